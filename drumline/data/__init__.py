"""Turns the `data` section of a config into micro-batches.

The steps, and their modules:

1. Read raw rows: `file_locations` and `files`, `sql`, `tasks`; `filters` applies conditions.
2. Convert them to forms of rows: `sources`, by `formats`, `turns`, `pairs` and others.
3. Encode rows to tokens and flags of targets: `encode`, `targets`, `thoughts`, `image_rows`.
   `workers` does so in several processes.
4. Drop copies, hold out and pack rows: `row_store`, `overlap`, `packing`, `make`.
5. Write a token cache, named by a hash of its input: `fingerprint`, `cache`; or endless `blocks`.
6. Order the samples, assign them to ranks and collate them: `order`, `collators`, `batches` and
   `judged`.

Entry points are `prepare.prepare` (the command and the planner), `order.BatchStream` (training) and
`preview.Reader`. `samples` is a path of its own, for data that is not tokenised.
"""
