# The agent, and in /payload the package for engines: one file tree for every Python, without anything else in it.
# Built by `make images`, whose folder build/images is the context: a wheel and locked requirements.
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
COPY requirements/agent.txt wheels/kvpeer-*.whl /build/
RUN python3 -m venv /usr/local/kvpeer \
    && /usr/local/kvpeer/bin/pip install --no-cache-dir --no-deps --target /payload /build/*.whl \
    && /usr/local/kvpeer/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /build/agent.txt \
    && /usr/local/kvpeer/bin/pip install --no-cache-dir --no-deps /build/*.whl \
    && /usr/local/kvpeer/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
COPY --from=build /usr/local/kvpeer /usr/local/kvpeer
COPY --from=build /payload /payload
ENV PATH=/usr/local/kvpeer/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
USER 65532:0
CMD ["kvpeer", "agent"]
