"""The path table and its guards."""

from __future__ import annotations

import pytest

from kslserve.errors import (
    InvalidApiKey,
    InvalidRequest,
    KslError,
    MethodNotAllowed,
    NotFound,
    OriginNotAllowed,
    QueueFull,
    UnknownHost,
)
from kslserve.http.message import Reply, Request, Response
from kslserve.http.router import Router, plain_error


async def exact(request: Request, reply: Reply) -> None: ...
async def item(request: Request, reply: Reply) -> None: ...
async def deep(request: Request, reply: Reply) -> None: ...
async def write(request: Request, reply: Reply) -> None: ...


def ask(path: str = "/a", method: str = "GET", version: str = "1.1", **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if version == "1.1":
        named = {"host": "localhost"} | named
    return Request(method, path, "", named, b"", "id", local="10.0.0.5", version=version)


def make(**options: object) -> Router:
    router = Router(**options)  # type: ignore[arg-type]
    router.add("GET", "/a", exact)
    router.add("POST", "/a", write)
    router.add("GET", "/items/{id}", item)
    router.add("GET", "/items/deep/{name}", deep)
    router.add("POST", "/only", write)
    router.add("GET", "/healthz", exact)
    return router


def test_table() -> None:
    router = make()
    assert router.resolve(ask("/a")) is exact
    assert router.resolve(ask("/a", "POST")) is write
    assert router.resolve(ask("/a", "HEAD")) is exact
    request = ask("/items/x%20y/z%2f")
    assert router.resolve(request) is item
    assert request.params == {"id": "x y/z/"}
    request = ask("/items/deep/1")
    assert router.resolve(request) is deep
    assert request.params == {"name": "1"}


@pytest.mark.parametrize("path", ["/", "/A", "/a/", "/items", "/items/", "", "x", "*", "//a"])
def test_nothing_there(path: str) -> None:
    with pytest.raises(NotFound):
        make().resolve(ask(path))


def test_wrong_method_names_the_right_ones() -> None:
    router = make()
    for path, method, allow in (
        ("/a", "DELETE", "GET, HEAD, OPTIONS, POST"),
        ("/only", "GET", "OPTIONS, POST"),
        ("/only", "HEAD", "OPTIONS, POST"),
    ):
        request = ask(path, method)
        with pytest.raises(MethodNotAllowed) as caught:
            router.resolve(request)
        assert ("allow", allow) in router.error_response(request, caught.value).headers


@pytest.mark.parametrize("path", ["a", "/x{id}", "/{id}/x", "/{id"])
def test_bad_routes(path: str) -> None:
    with pytest.raises(ValueError, match="bad route"):
        Router().add("GET", path, exact)


def test_one_handler_per_route() -> None:
    router = make()
    for path in ("/a", "/items/{id}", "/items/{other}"):
        with pytest.raises(ValueError, match="already"):
            router.add("GET", path, exact)


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8100", "localhost:", "127.0.0.1", "127.9.8.7:1", "[::1]",
        "[::1]:8100", "[::ffff:127.0.0.1]:1", "10.0.0.5", "10.0.0.5:99", "box.lan", "Box.LAN:1",
        "bound.example", "[fe80::1]:3",
    ],
)  # fmt: skip
def test_hosts_of_ours(host: str) -> None:
    router = make(allow_hosts=["box.lan:77", "fe80::1"])
    router.allow_host("bound.example")
    assert router.resolve(ask(host=host)) is exact


@pytest.mark.parametrize(
    "host",
    [
        "", ":8100", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
        "localhost:x", "10.0.0.6", "[::2]", "[::1", "::1]", "[::1]x", "[::1]:x", "localhost:1:2",
        "evil@localhost", "localhost, evil.example", "127.1", "0.0.0.0", "localhost:\u0663",
    ],
)  # fmt: skip
def test_other_hosts(host: str) -> None:
    with pytest.raises(UnknownHost):
        make().resolve(ask(host=host))


def test_missing_host() -> None:
    request = ask()
    del request.headers["host"]
    with pytest.raises(InvalidRequest):
        make().resolve(request)
    assert make().resolve(ask(version="1.0")) is exact


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://localhost:8100"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_foreign_origin(origin: str, method: str) -> None:
    """Whatever the method, and with nothing that would let the page read the answer."""
    for router in (make(), make(cors_origins=["https://app.example"], api_keys=["k"])):
        request = ask("/nothing", method, origin=origin, access_control_request_method="POST")
        with pytest.raises(OriginNotAllowed) as caught:
            router.resolve(request)
        assert request.reply_headers == ()
        assert router.error_response(request, caught.value).status == 403


def test_host_comes_before_origin() -> None:
    with pytest.raises(UnknownHost):
        make().resolve(ask(host="evil.example", origin="https://evil.example"))


def test_allowed_origin() -> None:
    router = make(cors_origins=["https://app.example/"])
    request = ask(origin="https://APP.example")
    assert router.resolve(request) is exact
    headers = dict(request.reply_headers)
    assert headers["access-control-allow-origin"] == "https://APP.example"
    assert headers["vary"] == "Origin"
    # Errors are readable by the page too.
    request = ask("/nothing", origin="https://app.example")
    with pytest.raises(NotFound):
        router.resolve(request)
    assert request.reply_headers


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ; charset=utf-8"])
def test_browser_post_of_json(kind: str) -> None:
    router = make(cors_origins=["https://app.example"])
    request = ask("/a", "POST", origin="https://app.example", content_type=kind)
    assert router.resolve(request) is write


@pytest.mark.parametrize("headers", [{}, {"content_type": "text/plain"}])
def test_browser_post_of_something_else(headers: dict[str, str]) -> None:
    router = make(cors_origins=["https://app.example"])
    with pytest.raises(InvalidRequest, match="content-type"):
        router.resolve(ask("/a", "POST", origin="https://app.example", **headers))
    # Without an Origin it is no browser.
    assert router.resolve(ask("/a", "POST", **headers)) is write


def test_preflight_needs_no_key() -> None:
    router = make(cors_origins=["https://app.example"], api_keys=["k"])
    request = ask(
        "/a",
        "OPTIONS",
        origin="https://app.example",
        access_control_request_method="POST",
        access_control_request_headers="authorization,x-title",
        access_control_request_private_network="true",
    )
    response = router.resolve(request)
    assert isinstance(response, Response)
    assert response.status == 204
    headers = dict(response.headers)
    assert headers["access-control-allow-methods"] == "POST"
    assert headers["access-control-allow-headers"] == "authorization,x-title"
    assert headers["access-control-allow-private-network"] == "true"
    assert dict(request.reply_headers)["access-control-allow-origin"] == "https://app.example"


def test_plain_options() -> None:
    router = make()
    assert router.resolve(ask("/only", "OPTIONS")) == Response(204, (("allow", "OPTIONS, POST"),))
    assert router.resolve(ask("*", "OPTIONS")) == Response(204)
    with pytest.raises(NotFound):
        router.resolve(ask("/nothing", "OPTIONS"))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-1"},
        {"authorization": "bearer  key-2 "},
        {"x_api_key": "key-2"},
        {"x_api_key": "key-1", "authorization": "Bearer wrong"},
        {"authorization": "Bearer schl\u00c3\u00bcssel"},  # UTF-8 as header text arrives
    ],
)
def test_accepted_keys(headers: dict[str, str]) -> None:
    router = make(api_keys=["key-1", "key-2", "schlüssel"])
    assert router.resolve(ask("/a", **headers)) is exact


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic key-1"},
        {"authorization": "key-1"},
        {"authorization": "Bearer key-1, Bearer key-1"},
        {"x_api_key": "key"},
        {"x_api_key": "key-11"},
        {"x_api_key": "KEY-1"},
        {"x_api_key": "\u0100"},
    ],
)
@pytest.mark.parametrize("path", ["/a", "/nothing", "/healthz/x"])
def test_refused_keys(headers: dict[str, str], path: str) -> None:
    """Unknown paths too: what exists here is not for strangers."""
    router = make(api_keys=["key-1"])
    request = ask(path, **headers)
    with pytest.raises(InvalidApiKey) as caught:
        router.resolve(request)
    response = router.error_response(request, caught.value)
    assert ("www-authenticate", "Bearer") in response.headers


def test_health_needs_no_key() -> None:
    assert make(api_keys=["k"]).resolve(ask("/healthz")) is exact


def test_compressed_body() -> None:
    with pytest.raises(InvalidRequest, match="compressed"):
        make().resolve(ask("/a", "POST", content_encoding="gzip"))
    assert make().resolve(ask("/a", "POST", content_encoding="identity")) is write


def test_plain_error() -> None:
    response = plain_error(None, QueueFull('say "please"', retry_after_s=3))
    assert response.status == 429
    assert response.headers == (("retry-after", "3"),)
    assert b'"say \\"please\\""' in response.body
    assert plain_error(None, KslError("x")).headers == ()


def test_error_mapping_is_the_owner_s() -> None:
    router = make(on_error=lambda request, error: Response(error.status, (("a", "b"),), b"mine"))
    assert router.error_response(None, NotFound("x")) == Response(404, (("a", "b"),), b"mine")
