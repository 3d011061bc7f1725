"""Configuration: sources and their order, and faults that name the key and the fix."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.agent.config import AgentConfig, MembershipSettings, Seed, effective, load, seeds_of
from kvpeer.agent.config.keys import Key, config_keys
from kvpeer.agent.config.reference import reference
from kvpeer.agent.config.units import format_duration, format_size, parse_duration, parse_size
from kvpeer.core import membership, slots
from kvpeer.model import ConfigError
from msgspec import inspect

ROOT = Path(__file__).parents[3]
SECRET = "ab" * 16


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    return file


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "pool:\n  size: 2Gi\n  extent_size: 128Mi\nmetrics:\n  enabled: off\n")
    config = load(file, {"KVPEER_POOL_SIZE": "3Gi", "PATH": "/bin"})
    assert config.pool.size_bytes == 3 << 30
    assert config.pool.extent_bytes == 128 << 20
    assert config.pool.lease_ttl_s == 0.05


TEXTS = {
    "agent.name": "n",
    "agent.cluster": "c",
    "agent.runtime_dir": "/r",
    "agent.socket": "/s",
    "agent.host": "127.0.0.2",
    "agent.advertise_host": "192.0.2.7",
    "agent.seeds": "10.0.0.1:1, b:2",
    "pool.size": "8Gi",
    "pool.extent_size": "32Mi",
    "pool.hugepages": "2Mi",
    "pool.lease_ttl": "60ms",
    "disk.path": "/d",
    "disk.size": "128Gi",
    "disk.segment_size": "512Mi",
    "membership.forget": "400s",
    "topology.devices": "mlx5_0, mlx5_1",
    "topology.gpus": "0000:1b:00.0",
    "security.mode": "insecure",
    "security.secret": SECRET,
    "security.secret_file": "/f",
    "metrics.host": "127.0.0.3",
    "metrics.enabled": "false",
}


@pytest.mark.parametrize("key", config_keys(), ids=lambda key: key.path)
def test_every_key_has_a_variable_that_sets_it(key: Key) -> None:
    if key.path in ("security.cert_file", "security.key_file", "security.ca_file", "pool.eviction"):
        pytest.skip("has meaning only with others, or only one value")
    text = TEXTS.get(key.path)
    if text is None and key.unit == "duration":
        text = "1500ms"
    elif text is None and isinstance(key.type, inspect.LiteralType):
        text = next(value for value in key.type.values if value != key.default)
    elif text is None:
        text = str(key.default + 1)
    config = load(None, {key.variable: text})
    assert getattr(getattr(config, key.group), key.attribute) != key.default


def test_an_empty_file_and_an_empty_environment_give_a_complete_configuration(tmp_path: Path) -> None:
    config = load(written(tmp_path, "pool:\n"), {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert config.agent.runtime_dir == "/run/user/7/kvpeer"
    assert config.agent.socket == "/run/user/7/kvpeer/agent.sock"
    assert config.agent.host == "127.0.0.1"
    assert config.metrics.host == "127.0.0.1"
    assert config.agent.name


def test_with_a_seed_the_host_is_the_address_on_the_route_to_it() -> None:
    assert load(None, {"KVPEER_AGENT_SEEDS": "127.0.0.1:7400"}).agent.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("pool:\n  sise: 1Gi\n", "unknown key pool.sise; did you mean pool.size?"),
        ("pol:\n  size: 1Gi\n", "unknown group 'pol'; did you mean pool?"),
        ("size: 1Gi\n", "unknown group 'size'"),
        ("pool:\n  verify: full\n", "unknown key pool.verify; did you mean transport.verify?"),
        ("pool:\n  zzzz: 1\n", "unknown key pool.zzzz; there are pool.size, "),
        ("pool: 4Gi\n", "pool must hold `key: value` lines, not '4Gi'"),
        ("- pool\n", "must hold groups"),
        ("pool: [\n", "is not YAML"),
        ("pool:\n  size: 4Gb\n", "pool.size: '4Gb' is not a size such as 64Gi"),
        ("pool:\n  size: 0.5\n", "pool.size is 0.5, but must be a size from 1Mi to 16Ti"),
        ("pool:\n  size: 4Ki\n", "pool.size is '4Ki', but must be a size from 1Mi to 16Ti"),
        ("pool:\n  size: true\n", "pool.size is True, but must be a size"),
        ("agent:\n  linger: 2\n", "without a unit: write for example 2s"),
        ("agent:\n  linger: 25h\n", "must be a duration from 0s to 86400s"),
        ("agent:\n  linger: 2d\n", "is not a duration such as 2s"),
        ("transport:\n  verify: maybe\n", "transport.verify is 'maybe', but must be one of full, generation"),
        ("agent:\n  control_port: 70000\n", "must be a whole number from 0 to 65535"),
        ("agent:\n  cluster: a/b\n", "agent.cluster is 'a/b', but must be a text that matches"),
        ("agent:\n  seeds: 10.0.0.1:1\n", "must be a list of at most 64 texts"),
        ("metrics:\n  enabled: 5\n", "metrics.enabled is 5, but must be true or false"),
    ],
)
def test_a_faulty_file_is_refused_with_key_and_fix(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {})
    assert fault in str(caught.value)


def test_an_unreadable_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*missing.yaml: No such file"):
        load(tmp_path / "missing.yaml", {})
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        load(written(tmp_path, "#" * (1 << 21)), {})


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"KVPEER_POOL_SISE": "1Gi"}, "unknown variable KVPEER_POOL_SISE; did you mean KVPEER_POOL_SIZE?"),
        ({"KVPEER_POL_SIZE": "1Gi"}, "unknown variable KVPEER_POL_SIZE; did you mean KVPEER_POOL_SIZE?"),
        (
            {"KVPEER_AGENT_CONTROL_PORT": "x"},
            "KVPEER_AGENT_CONTROL_PORT is 'x', but must be a whole number from 0 to 65535",
        ),
        ({"KVPEER_METRICS_ENABLED": "maybe"}, "must be true or false"),
        ({"KVPEER_AGENT_HOST": "0.0.0.0"}, "agent.host is 0.0.0.0, which peers cannot reach"),
        ({"KVPEER_AGENT_HOST": "::"}, "which peers cannot reach"),
        ({"KVPEER_AGENT_ADVERTISE_HOST": "0.0.0.0"}, "agent.advertise_host is 0.0.0.0, which peers cannot reach"),
        ({"KVPEER_AGENT_ADVERTISE_HOST": "proxy"}, "agent.advertise_host is 'proxy', but must be a numeric address"),
        (
            {"KVPEER_AGENT_ADVERTISE_CONTROL_PORT": "5", "KVPEER_AGENT_ADVERTISE_DATA_PORT": "5"},
            "agent.advertise_control_port and agent.advertise_data_port are both 5",
        ),
        ({"KVPEER_AGENT_HOST": "node1"}, "agent.host is 'node1', but must be a numeric address"),
        ({"KVPEER_AGENT_CONTROL_PORT": "9" * 5000}, "KVPEER_AGENT_CONTROL_PORT is '999"),
        ({"KVPEER_AGENT_SEEDS": "node1"}, "agent.seeds: 'node1' has no port"),
        ({"KVPEER_AGENT_SEEDS": "http://a:1"}, "is not address:port"),
        ({"KVPEER_AGENT_SEEDS": "a:99999"}, "is not address:port"),
        ({"KVPEER_AGENT_RUNTIME_DIR": "run"}, "agent.runtime_dir is 'run', but must be an absolute path"),
        ({"KVPEER_AGENT_SOCKET": "/" + "x" * 107}, "agent.socket has 108 bytes"),
        ({"KVPEER_AGENT_DATA_PORT": "5", "KVPEER_METRICS_PORT": "5"}, "agent.data_port and metrics.port are both 5"),
        ({"KVPEER_POOL_SIZE": "32Mi"}, "less than one pool.extent_size (64Mi)"),
        ({"KVPEER_POOL_SIZE": "16Ti", "KVPEER_POOL_EXTENT_SIZE": "1Mi"}, "raise pool.extent_size"),
        ({"KVPEER_POOL_HUGEPAGES": "1Gi"}, "pool.extent_size is 64Mi, but must be a multiple of 1Gi"),
        ({"KVPEER_DISK_PATH": "pages"}, "disk.path is 'pages', but must be an absolute path"),
        ({"KVPEER_DISK_PATH": "/d", "KVPEER_DISK_SIZE": "16Mi"}, "less than one disk.segment_size (256Mi)"),
        (
            {"KVPEER_DISK_PATH": "/d", "KVPEER_DISK_SIZE": "1Ti"},
            "disk.size is 4096 segments, each of them an open file, but at most 512 can be used: raise",
        ),
        (
            {"KVPEER_DISK_PATH": "/d", "KVPEER_DISK_SEGMENT_SIZE": "64Mi"},
            "disk.segment_size is 64Mi, but must be larger than pool.extent_size (64Mi)",
        ),
        (
            {"KVPEER_DISK_PATH": "/d", "KVPEER_DISK_SEGMENT_SIZE": "134217729"},
            "disk.segment_size is 134217729 bytes, but must be a multiple of 4Ki",
        ),
        ({"KVPEER_MEMBERSHIP_FORGET": "10s"}, "membership.forget must be at least 10 times"),
        ({"KVPEER_SECURITY_SECRET": "ab" * 15}, "security.secret has 120 bits, but at least 128"),
        ({"KVPEER_SECURITY_SECRET": "correct horse battery staple"}, "hexadecimal"),
        ({"KVPEER_SECURITY_SECRET": SECRET, "KVPEER_SECURITY_SECRET_FILE": "/s"}, "are both set: keep one"),
        ({"KVPEER_SECURITY_SECRET": SECRET, "KVPEER_SECURITY_MODE": "insecure"}, "security.secret has no meaning"),
        ({"KVPEER_SECURITY_CERT_FILE": "/c"}, "security.cert_file has no meaning with security.mode shared_secret"),
        ({"KVPEER_SECURITY_MODE": "mutual_tls", "KVPEER_SECURITY_CA_FILE": "/c"}, "needs security.cert_file"),
    ],
)
def test_a_faulty_environment_is_refused_with_key_and_fix(env: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, env)
    assert fault in str(caught.value)


def test_service_links_of_kubernetes_and_variables_of_others_are_left_alone() -> None:
    env = {
        "KVPEER_AGENT_PORT": "tcp://10.0.0.1:7400",
        "KVPEER_AGENT_PORT_7400_TCP_ADDR": "10.0.0.1",
        "KVPEER_AGENT_SERVICE_HOST": "10.0.0.1",
        "KVPEER_AGENT_SERVICE_PORT_CONTROL": "7400",
        "KVPEER_METRICS_PORT": "tcp://10.0.0.1:9400",
        "KVPEER_CONFIG": "/etc/x",
    }
    assert load(None, env).metrics.port == 0


def test_a_secret_shows_neither_in_errors_nor_in_the_effective_text_nor_in_repr() -> None:
    config = load(None, {"KVPEER_SECURITY_SECRET": SECRET})
    assert config.security.secret == SECRET
    assert SECRET not in effective(config)
    assert SECRET not in repr(config)
    assert 'secret: "***"' in effective(config)
    bad = SECRET + "x"
    with pytest.raises(ConfigError) as caught:
        load(None, {"KVPEER_SECURITY_SECRET": bad})
    assert SECRET not in str(caught.value)


def test_the_effective_text_is_a_file_that_gives_the_same_configuration(tmp_path: Path) -> None:
    config = load(None, {"KVPEER_POOL_SIZE": "3Gi", "KVPEER_AGENT_SEEDS": "a:1,b:2", "KVPEER_METRICS_ENABLED": "off"})
    assert load(written(tmp_path, effective(config)), {}) == config


def test_seeds_take_the_own_control_port_and_ipv6() -> None:
    config = load(
        None, {"KVPEER_AGENT_SEEDS": "a.b.svc,10.0.0.1:5,[fd00::1]:6,fd00::2", "KVPEER_AGENT_CONTROL_PORT": "7400"}
    )
    assert seeds_of(config) == (Seed("a.b.svc", 7400), Seed("10.0.0.1", 5), Seed("fd00::1", 6), Seed("fd00::2", 7400))


def test_every_setting_is_read_by_the_agent() -> None:
    """A key that nothing reads would promise what nobody does."""
    parts = [ROOT / "runtime" / "kvpeer" / part for part in ("agent", "cli")]
    sources = [path for part in parts for path in part.rglob("*.py") if path.parts[-2:] != ("config", "settings.py")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in sources)))
    groups_read_as_a_whole = {"membership"}  # its fields are those of kvpeer.core.membership's settings
    unread = [
        f"{key.group}.{key.attribute}"
        for key in config_keys()
        if key.attribute not in words and key.group not in groups_read_as_a_whole
    ]
    assert unread == []


def test_every_setting_of_the_membership_and_the_slots_can_be_set() -> None:
    core = {field.name for field in dataclasses.fields(membership.MembershipSettings)}
    assert set(msgspec.structs.asdict(MembershipSettings())) == core
    needed = {
        field.name for field in dataclasses.fields(slots.SlotSettings) if field.default is not dataclasses.MISSING
    }
    assert needed <= set(msgspec.structs.asdict(AgentConfig().pool))


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


@given(st.integers(0, 1 << 60))
def test_sizes_survive_the_round_trip(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 10**9))
def test_durations_survive_the_round_trip(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, rel=1e-8)


@given(st.text(max_size=12))
def test_any_text_is_a_unit_value_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0
