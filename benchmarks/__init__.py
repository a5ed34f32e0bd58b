"""Paceline beside its peers: each figure is measured for all of them in one run, on this machine.

    marks, workload, jobs   what the training processes do, and how they tell what they saw
    scripts/                one script for each system: the same jobs, started its way
    local_ray               the Ray that some of those scripts have to themselves
    systems, processes      starting those scripts
    rows/                   one module for each line of the table
    figures, growth, tables the outcome as values, and how it is shown

The process that leads imports neither torch nor Paceline: whatever is timed happens in processes of its own.
"""
