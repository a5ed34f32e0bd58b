"""What `python -m pytest` does, for the reader: the tests of the folder in which it is called."""

import os
import sys

import pytest

sys.path.insert(0, os.getcwd())  # what lies there is forgotten in the end, as it comes first
sys.exit(pytest.main(sys.argv[1:]))
