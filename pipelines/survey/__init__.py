"""What a cluster offers its user, and a first profile for it: `lockstep profile init`.

Three steps, apart from one another: the texts of Slurm's commands become values, a pure function
of these values chooses and gives a reason for each choice, and the choices become a file. The
cluster is only read. It may import `base`, `config` and `slurm`.
"""
