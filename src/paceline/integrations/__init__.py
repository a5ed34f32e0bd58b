"""Trainers of other libraries in our runs: a callback for each, in a module that is named for its library."""
