"""Start the ranks of a run, watch them, and start them again after a failure.

`spec.LocalLauncher` and `slurm.spec.SlurmLauncher` are the kinds of `launch.kind`; `drumline train`
calls their `require`, `early` and `start`, in this order. `local.launch` runs one attempt after the
other: an attempt is `agent.Agent` on this host, or an srun step within a Slurm job (`slurm.job`).
Ranks that another program has started (torchrun, srun, mpirun) are joined by `environment` and
`tasks`. `watch` and `hangs` find ranks that hang, `postmortem` the rank that failed first, and
`lease` keeps two launchers out of one run folder. `drumline ps`, `logs`, `follow` and `stop` are in
`runs`.
"""
