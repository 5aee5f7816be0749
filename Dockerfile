# An image with torch, commpress and its optional parts. `make image` builds and runs it, or its steps where there is no Docker.
#
#   docker build -t commpress .                                                            for the CPU
#   docker build -t commpress --build-arg EXTRA=cuda12 --build-arg INDEX=https://download.pytorch.org/whl/cu126 .
#   docker run --rm --network host --shm-size 2g commpress commpress doctor
#
# CUDA comes with torch's wheels; the host needs the driver and the NVIDIA container toolkit, and `docker run --gpus all`.
FROM python:3.11-slim
ARG INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRA=metrics
RUN pip install --no-cache-dir torch==2.13.0 ${INDEX:+--index-url ${INDEX}}
WORKDIR /commpress
COPY . .
RUN pip install --no-cache-dir ".[${EXTRA}]"
WORKDIR /work
CMD ["commpress", "doctor"]
