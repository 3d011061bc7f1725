# The operator, and of the runtime the names of metrics. Built by `make images`, whose folder build/images is the context: a wheel and locked requirements.
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
COPY requirements/operator.txt wheels/kvpeer-*.whl wheels/kvpeer_operator-*.whl /build/
RUN python3 -m venv /usr/local/kvpeer \
    && /usr/local/kvpeer/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /build/operator.txt \
    && /usr/local/kvpeer/bin/pip install --no-cache-dir --no-deps /build/*.whl \
    && /usr/local/kvpeer/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
COPY --from=build /usr/local/kvpeer /usr/local/kvpeer
ENV PATH=/usr/local/kvpeer/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    # Kopf asks for the user's name, and users in containers have none.
    LOGNAME=kvpeer-operator
USER 65532:65532
CMD ["kopf", "run", "--standalone", "--all-namespaces", "--module=kvpeer_operator.main"]
