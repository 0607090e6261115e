"""Checkpoints: sharded, canonical (any number of ranks can load them), and whole after a power cut.

Imports `config`, `system` and what is below. Begin reading with `manifest` (what lies in a
checkpoint's folder), `save` (`Checkpointer`, the steps of a save) and `load`. `retention` decides
which checkpoints are kept, `ranks` lets all ranks succeed or fail together, `storage` and `staging`
are the files and the host memory under torch.distributed.checkpoint. Copies elsewhere: `remote` at
a URL, `disks` on hosts that share no disk, `memory` in /dev/shm.

A run saves by `train.saving` and resumes by `train.restore`. Exports, evaluations and inference
read checkpoints by `load` and `remote.local_copy`.
"""
