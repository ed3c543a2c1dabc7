"""Starting the processes of a job: on this machine, or through SLURM."""
