#!/usr/bin/env bash
# Download what the GPU machine lacks into a folder that travels with the checkout: scripts/gpu_wheels.sh [FOLDER]. DeepSpeed is a source package.
# Expected there: torch, transformers, accelerate, peft, pyarrow, pandas, pyyaml, rich, typer and what these need. psutil is for tests and
# ranks; httpx2, httpcore2 and truststore are imported by rollouts and come with huggingface_hub 2 alone.
set -euo pipefail
folder=${1:-.whl}
python3 -m pip download --disable-pip-version-check --dest "$folder" --no-deps --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform any --implementation cp \
  pydantic==2.12.0 pydantic-core==2.41.1 annotated-types==0.7.0 typing-inspection==0.4.2 \
  datasets==4.0.0 dill==0.3.8 multiprocess==0.70.16 xxhash hjson einops msgpack py-cpuinfo trl liger-kernel torchao \
  pytest pytest-xdist pytest-timeout execnet iniconfig pluggy psutil httpx2 httpcore2 truststore
DS_BUILD_OPS=0 python3 -m pip wheel --disable-pip-version-check --no-deps --wheel-dir "$folder" deepspeed==0.19.8
du -sh "$folder"
