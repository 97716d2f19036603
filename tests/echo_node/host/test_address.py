import pytest

from echo_node.host.address import HubAddress
from echo_shared.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "websocket"),
    [
        ("http://127.0.0.1:8710", "ws://127.0.0.1:8710/node"),
        ("http://localhost:8710/", "ws://localhost:8710/node"),
        ("http://[::1]:8710", "ws://[::1]:8710/node"),
        ("https://hub.example.org", "wss://hub.example.org/node"),
        ("  https://Hub.Example.org/echo/ ", "wss://hub.example.org/echo/node"),
    ],
)
def test_the_websocket_follows_from_the_address(url: str, websocket: str) -> None:
    assert HubAddress.parse(url, insecure=False).websocket == websocket


@pytest.mark.parametrize("prefix", ["", "/echo", "/a/b"])
@pytest.mark.parametrize(
    "page",
    [
        "/",
        "//",
        "/leaderboard",
        "/leaderboard/",
        "/about",
        "/teams",
        "/teams/The%20Herons",
        "/nodes/0123456789",
        "/leaderboard?sort=-trained&team=a%2Fb#top",
        "/operator",
        "/operator#fleet",
        "/?page=2",
        "/#curves",
        "/metrics",
        "/healthz",
        "/readyz",
        "/node",
        "/api/v1/run",
        "/api/v1/leaderboard?limit=10",
    ],
)
def test_a_page_of_the_hub_is_the_hub_s_address(prefix: str, page: str) -> None:
    pasted = f"https://Hub.example.org:8710{prefix}{page}"
    assert HubAddress.parse(pasted, insecure=False).origin == f"https://hub.example.org:8710{prefix}"


@pytest.mark.parametrize("path", ["/leaderboards", "/my-operator", "/leaderboard/echo", "/api", "/api/v2/run"])
def test_an_unknown_path_is_part_of_the_hubs_address(path: str) -> None:
    assert HubAddress.parse(f"https://hub.example.org{path}", insecure=False).origin.endswith(path)


def test_paths_that_the_hub_names_are_below_its_address() -> None:
    address = HubAddress.parse("https://hub.example.org/echo", insecure=False)
    assert address.url("/announce/k") == "https://hub.example.org/echo/announce/k"


@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("ftp://hub", "scheme 'ftp'"),
        ("ws://hub", "scheme 'ws'"),
        ("hub:8710", "scheme 'hub'"),
        ("hub", "no scheme"),
        ("http://", "no host"),
        ("https://hub:port", "port"),
        ("https://user:pw@hub", "more than"),
        ("https://[::1", "IPv6"),
    ],
)
def test_an_invalid_address_is_reported(url: str, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HubAddress.parse(url, insecure=True)
    assert caught.value.code == "bad_url" and got in (caught.value.got or "")


@pytest.mark.parametrize("url", ["http://hub.example.org", "http://192.168.1.7:8710", "http://127.0.0.1.example.org"])
def test_unencrypted_only_to_this_machine_unless_asked_for(url: str) -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        HubAddress.parse(url, insecure=False)
    assert HubAddress.parse(url, insecure=True).origin == url


@pytest.mark.parametrize(
    ("url", "here"),
    [("http://127.0.0.1:1", True), ("https://LOCALHOST", True), ("http://[::1]:8710", True), ("https://a.org", False)],
)
def test_knows_this_machine(url: str, here: bool) -> None:
    assert HubAddress.parse(url, insecure=False).is_loopback is here
