"""The command line: `paceline VERB`. One module for each group of verbs, each added to the app in `app`.

Nothing heavy is imported before a verb runs: `paceline --help` answers at once.
"""


def main(name: str | None = None) -> None:
    """As the command of this name; by default that by which it was started."""
    import sys

    from paceline.cli import streams
    from paceline.cli.app import build

    streams.suit()
    build(*sys.argv[1:2])(prog_name=name)
