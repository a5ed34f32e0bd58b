"""What a run leaves behind: ranks' reports paired into steps, their parts committed as checkpoints, the run folder, and
callbacks told of it all. Whoever runs the function feeds it: a controller, a tuner, or a loop on rank 0."""
