from pathlib import Path

import pytest

from echo_node.config import NodeConfig, load_config
from echo_shared.errors import ConfigError


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("threads = 1\nwidth = 10\nname = 'from file'\n")
    monkeypatch.setenv("ECHO_NODE_WIDTH", "20")
    monkeypatch.setenv("ECHO_NODE_NAME", "from environment")
    monkeypatch.setenv("ECHO_NODE_HOME", "not a setting")
    config = load_config(file, {"name": "from flag", "threads": None})
    assert (config.threads, config.width, config.name, config.backend) == (1, 20, "from flag", "auto")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("threads = 1\n\nwidth = -3\n", ["line 3", "width = -3", "greater than or equal to 0"]),
        ("backend = 'mlx2'\n", ["line 1", "backend"]),
        ("# nothing\nthread = 2\n", ["line 2", "no setting thread", "did you mean threads?"]),
        ("threads = \n", ["not valid TOML", "line 1"]),
    ],
)
def test_errors_name_key_and_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    for word in [*words, str(file)]:
        assert word in str(caught.value)


def test_helpers_mean_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NodeConfig(backend="torch").wanted_backend == "torch"
    file = tmp_path / "config.toml"
    file.write_text('helpers = ["127.0.0.1:1", "localhost:2"]\n')
    config = load_config(file, {})
    assert (config.helpers, config.wanted_backend) == (("127.0.0.1:1", "localhost:2"), "llama_cpp")
    monkeypatch.setenv("ECHO_NODE_HELPERS", '["127.0.0.1:3"]')
    assert load_config(file, {}).helpers == ("127.0.0.1:3",)
    assert load_config(file, {"helpers": ["127.0.0.1:4"]}).helpers == ("127.0.0.1:4",)


def test_a_misspelt_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_NODE_HOME", "not a setting, and known")
    monkeypatch.setenv("ECHO_NODE_WITDH", "8")
    with pytest.raises(ConfigError, match="ECHO_NODE_WITDH; did you mean ECHO_NODE_WIDTH"):
        load_config(None, {})


@pytest.mark.parametrize(("limit", "share"), [(0, 0), (1, 1), (2, 1), (1_000_001, 500_001)])
def test_the_two_ways_to_other_nodes_share_the_limit(limit: int, share: int) -> None:
    assert NodeConfig(upload_limit_bytes_s=limit).upload_share_bytes_s == share
