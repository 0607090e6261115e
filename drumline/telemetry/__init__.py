"""What a run records about itself: its event log, and the measurements that go into it.

- `events`, `watched`, `damage`: the kinds of events, and reading and writing events.jsonl.
- `measure`, `plan_accuracy`: memory, seconds and traffic of a run, compared with its plan. They use
  `memory_tracker` (tensors on a CPU) and `traffic` (bytes that collectives send).
- `devices`, `stragglers`, `profile`: readings of the devices, slow ranks, torch.profiler.
- `flight`: torch's flight recorder, by which the launcher finds the rank that hangs.
- `trackers`: pass events on to TensorBoard, W&B and others, and to the user's callbacks.
"""
