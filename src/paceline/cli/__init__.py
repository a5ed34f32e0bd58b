"""The command line: `paceline VERB`. One module for each group of verbs, each added to the app in `app`.

Nothing heavy is imported before a verb runs: `paceline --help` answers at once.
"""


def main(name: str | None = None) -> None:
    """As the command of this name; by default that by which it was started."""
    import sys

    from paceline.cli import streams
    from paceline.cli.app import build

    streams.suit()
    try:
        build(*sys.argv[1:2])(prog_name=name)
    except OSError as error:  # of the help, say: verbs answer for theirs
        from paceline.cli.asking import USAGE, tell_refusal

        tell_refusal(error)
        sys.exit(USAGE)
