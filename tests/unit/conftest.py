"""Fixtures of the unit tests."""

import pickle

import pytest


@pytest.fixture
def asking():
    """Makes the `ask` of a worker whose driver is this process: what they say is pickled, as between machines. What is
    asked is noted in the list that it is given."""

    def asking(relay, asked=None):
        def ask(request):
            if asked is not None:
                asked.append(request)
            answer = _sent(relay.answer(_sent(request)))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return ask

    return asking


def _sent(value):
    return pickle.loads(pickle.dumps(value))
