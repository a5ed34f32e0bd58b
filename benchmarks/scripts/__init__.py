"""What is run in processes of its own: the jobs with each system, and measurements that concern Paceline alone."""
