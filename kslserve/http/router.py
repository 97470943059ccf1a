"""From a request head to its handler: Host, Origin and key checks, the path table, and error
mapping.

A loopback port is open to every page in a browser beside it, so Host and Origin are checked first
(a rebound name shows in Host, a foreign page in Origin) and only then anything else. Everything
here looks at the head alone; it runs before the body arrives.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Callable, Iterable
from urllib.parse import unquote

from kslserve.errors import (
    InvalidApiKey,
    InvalidRequest,
    KslError,
    MethodNotAllowed,
    NotFound,
    OriginNotAllowed,
    UnknownHost,
)
from kslserve.http.message import Handler, Header, Request, Response

PUBLIC_PATHS = frozenset(("/healthz", "/livez", "/readyz"))  # never need a key
PREFLIGHT_AGE_S = 600
EXPOSED = "x-request-id, retry-after"
OnError = Callable[[Request | None, KslError], Response]


class Router:
    """The path table and its guards.

    api_keys: accepted keys; none means that no key is asked for. cors_origins: origins that may
    call from a browser. allow_hosts: further names that clients may use in Host. on_error: turns an
    error into a response; the API layer sets it.
    """

    def __init__(
        self,
        *,
        api_keys: Iterable[str] = (),
        cors_origins: Iterable[str] = (),
        allow_hosts: Iterable[str] = (),
        on_error: OnError | None = None,
    ) -> None:
        self.on_error: OnError = on_error or plain_error
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: list[tuple[str, str, dict[str, Handler]]] = []
        self._keys = [key.encode() for key in api_keys]
        self._origins = frozenset(origin.lower().rstrip("/") for origin in cors_origins)
        self._hosts = {"localhost", "127.0.0.1", "::1", *(_bare(host) for host in allow_hosts)}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Serve `method` on a path. The path is exact, or ends in one `{name}`, which takes the
        rest (slashes included, at least one character) into `Request.params`. GET serves HEAD as
        well."""
        head, brace, name = path.partition("{")
        if not path.startswith("/") or (brace and (not name.endswith("}") or head[-1] != "/")):
            raise ValueError(f"bad route {path!r}")
        if not brace:
            methods = self._exact.setdefault(path, {})
        else:
            known = {prefix: entry for prefix, _, entry in self._prefixes}
            methods = known.get(head, {})
            if head not in known:
                self._prefixes.append((head, name[:-1], methods))
                self._prefixes.sort(key=lambda entry: -len(entry[0]))
        if method in methods:
            raise ValueError(f"{method} {path} has a handler already")
        methods[method] = handler

    def allow_host(self, host: str) -> None:
        """Accept a name or address in Host, such as the one that the server was bound to."""
        if host:
            self._hosts.add(_bare(host))

    def resolve(self, request: Request) -> Handler | Response:
        """The handler of a request, or the response to a preflight or other OPTIONS request. Fills
        `params` and `reply_headers`. Raises KslError for one that is refused."""
        headers = request.headers
        self._check_host(request)
        origin = headers.get("origin")
        if origin is not None:
            self._check_origin(request, origin)
        if request.method == "OPTIONS":
            return self._options(request)
        if self._keys and request.path not in PUBLIC_PATHS and not self._has_key(headers):
            raise InvalidApiKey("The API key is missing or not accepted here.")
        methods = self._find(request)
        handler = methods.get(request.method)
        if handler is None and request.method == "HEAD":
            handler = methods.get("GET")
        if handler is None:
            raise _WrongMethod(request, methods)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("A compressed body is not supported; send it without.")
        if origin is not None and request.method == "POST":
            # A page may send other types without a preflight.
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise InvalidRequest("From a browser, the content-type must be application/json.")
        return handler

    def error_response(self, request: Request | None, error: KslError) -> Response:
        """The response to an error, in the words of `on_error`."""
        response = self.on_error(request, error)
        extra: tuple[Header, ...] = ()
        if isinstance(error, _WrongMethod):
            extra = (("allow", error.allow),)
        elif isinstance(error, InvalidApiKey):
            extra = (("www-authenticate", "Bearer"),)
        if not extra:
            return response
        return Response(response.status, response.headers + extra, response.body)

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host")
        if host is None:
            if request.version == "1.0":
                return
            raise InvalidRequest("The request has no Host header.")
        name = _bare(host)
        if name in self._hosts or (name and name == request.local) or _is_loopback(name):
            return
        raise UnknownHost(f"The host `{host[:100]}` is not served here; see --allow-host.")

    def _check_origin(self, request: Request, origin: str) -> None:
        if origin.lower() not in self._origins:
            raise OriginNotAllowed(
                f"The origin `{origin[:100]}` is not allowed; see --cors-origin."
            )
        request.reply_headers = (
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", EXPOSED),
            ("vary", "Origin"),
        )

    def _options(self, request: Request) -> Response:
        """A preflight carries no key and names what it wants, which is echoed; other OPTIONS
        requests get the methods of the path."""
        wanted = request.headers.get("access-control-request-method")
        if wanted is None or not request.reply_headers:
            if request.path == "*":
                return Response(204)
            return Response(204, (("allow", _allow(self._find(request))),))
        headers = [
            ("access-control-allow-methods", wanted),
            ("access-control-max-age", str(PREFLIGHT_AGE_S)),
        ]
        names = request.headers.get("access-control-request-headers")
        if names:
            headers.append(("access-control-allow-headers", names))
        if request.headers.get("access-control-request-private-network") == "true":
            headers.append(("access-control-allow-private-network", "true"))
        return Response(204, tuple(headers))

    def _has_key(self, headers: dict[str, str]) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "").strip()]
        if scheme.lower() == "bearer":
            offered.append(token.strip())
        # Every pair is compared, each in constant time.
        matches = 0
        for text in filter(None, offered):
            data = text.encode("latin-1", "replace")
            for key in self._keys:
                matches += hmac.compare_digest(data, key)
        return matches > 0

    def _find(self, request: Request) -> dict[str, Handler]:
        path = request.path
        methods = self._exact.get(path)
        if methods is None and "%" in path:
            methods = self._exact.get(unquote(path))
        if methods is not None:
            return methods
        for prefix, name, found in self._prefixes:
            if path.startswith(prefix) and len(path) > len(prefix):
                request.params[name] = unquote(path[len(prefix) :])
                return found
        raise NotFound(f"There is nothing at {request.method} {path[:200]}.")


class _WrongMethod(MethodNotAllowed):
    """Carries the methods that the path has, for the Allow header."""

    def __init__(self, request: Request, methods: dict[str, Handler]) -> None:
        self.allow = _allow(methods)
        super().__init__(f"{request.path[:200]} takes {self.allow}, not {request.method}.")


def plain_error(request: Request | None, error: KslError) -> Response:
    """A neutral error body, until the API layer sets its own mapping."""
    body = {"error": {"message": error.message, "code": error.code}}
    headers: tuple[Header, ...] = ()
    if error.retry_after_s is not None:
        headers = (("retry-after", str(error.retry_after_s)),)
    return Response(error.status, headers, json.dumps(body).encode())


def _allow(methods: dict[str, Handler]) -> str:
    names = {*methods, "OPTIONS"}
    if "GET" in names:
        names.add("HEAD")
    return ", ".join(sorted(names))


def _bare(host: str) -> str:
    """The name of `name`, `name:port`, `[v6]:port` or bare v6, in lower case; the whole text, which
    no entry equals, when the port is none."""
    host = host.lower()
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        if not bracket or (port and not (port[0] == ":" and _is_port(port[1:]))):
            return host
        return name
    name, colon, port = host.rpartition(":")
    if not colon or ":" in name:
        return host
    return name if _is_port(port) else host


def _is_port(text: str) -> bool:
    return not text or (text.isascii() and text.isdigit())


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
