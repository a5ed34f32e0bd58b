"""Scripts as they are, on many workers: the launcher behind `paceline run`.

driver    size, program       what a command line asks for: how many workers, a script or a command
          imports             what the script will need, loaded once where workers are forked from
          launcher            all of it put together, with the exit code
worker    as_main, as_child   run the script in this process, or the command as a child
          notice, ending      what reaches a script when the run is to end, and what Python does when it has ended
"""
