"""Communication of the ranks of a run, on torch.distributed.

Imports `config`, `system`, `vendor` and what is below. `start` joins and leaves the process group
(`train.entry` and `train.session` call it), `timeouts` limits how long a collective may wait, and
`roll_call` finds out which hosts are still at work. `mesh` makes the device mesh that strategies
shard over; `config.mesh` explains its dimensions. `reduce` sums small numbers over the ranks.

Two modules are about one rank: `seeds` derives random numbers from (seed, step, rank), and `copies`
moves tensors between the host and a GPU without waiting.
"""
