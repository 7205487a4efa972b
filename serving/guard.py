"""Decides which clients may use the server, and which web pages may read its answers.

Any web site can make the browsers of its visitors send requests to http://localhost:8000. So a
server on your own machine gets requests from strangers. Three headers tell us who asks:

    Origin          the site whose page sends the request. Clients that are no browsers send none.
    Host            the name by which the client calls us. A site can let a name of its own point to
                    127.0.0.1 (DNS rebinding). Then Origin names the same site as Host, as it does
                    for our own page; but Host is not a loopback name. If we listen on a loopback
                    address, we refuse the request. On another address (--host 0.0.0.0) only an API
                    key helps against this.
    Authorization   the API key, if the server has any. `--metrics-key` opens /metrics alone.

`--allow-origin https://chat.example` lets in the pages of one more site. It also lets clients call
us by the name chat.example, since a proxy in front of us passes that name on in Host.
"""
import base64
import hashlib
import hmac
import re
from collections.abc import Sequence
from email.message import Message as Headers
from ipaddress import ip_address
from urllib.parse import urlsplit

from config import require
from serving.operations import APIError

ORIGIN = re.compile(r"(?ai)\*|null|[a-z][a-z0-9+.-]*://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?")
# Browsers leave out a scheme's own port; pages from files have the origin "null"; others have no
# pages.
SENT_OTHERWISE = re.compile("(?i)http:.*:80|https:.*:443|(file|ftp|ws|wss):.*")
ALL_KEYS = "*"      # stands for the prefix of the client that counts what all keys do


class Guard:
    """Reads the headers of a request. May this site ask (check_site)? What may this client see
    (prefix)? May a page of this site read our answer (cors)?"""

    def __init__(self, host: str, api_keys: Sequence[str] = (), origins: Sequence[str] = (),
                 metrics_key: str | None = None):
        """host: the address that we listen on. api_keys: if there is none, no key is needed.
        origins: the sites whose pages may ask and read, besides our own page; "*": all sites.
        metrics_key: one more key, which opens /metrics alone. ValueError for a key or an origin
        that no client could send."""
        for key in api_keys:
            check_key("api_key", key)
        if metrics_key is not None:
            check_key("metrics_key", metrics_key)
            require(api_keys and metrics_key not in api_keys, "metrics_key",
                    "a key of its own, beside at least one api_key", metrics_key)
        for origin in origins:
            require(ORIGIN.fullmatch(origin) and not SENT_OTHERWISE.fullmatch(origin),
                    "allow_origin",
                    "* or one origin as browsers send it, such as https://chat.example, "
                    "http://localhost:3000 or chrome-extension://abc", origin)
        self.keys = [(key.encode(), prefix_of(key)) for key in api_keys]
        self.metrics_keys = self.keys + ([(metrics_key.encode(), ALL_KEYS)] if metrics_key else [])
        self.prefixes = [prefix for _, prefix in self.keys] or [""]
        self.origins = {origin.lower() for origin in origins}       # as browsers send them
        self.our_names = {urlsplit(origin).hostname for origin in origins
                          if origin.startswith("http")}
        self.is_local = is_loopback(host)

    def check_site(self, headers: Headers):
        """APIError for a request from the page of a site that we do not know."""
        host, origin = ", ".join(headers.get_all("Host", [])), headers.get("Origin")
        called_by = name_of(host)
        if self.is_local and host and not (is_loopback(called_by) or called_by in self.our_names):
            raise APIError(403, "we listen on a loopback address, which "
                                f"{host!r:.100} does not name: use localhost, or start the server "
                                "with --allow-origin http://NAME")
        # A page that loads our answer (as an image, for example) sends no Origin. But browsers
        # say where the page is from.
        loads = origin is None and headers.get("Sec-Fetch-Mode") != "navigate"
        strange = headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        if loads and strange and "*" not in self.origins:
            raise APIError(403, "a page of another site may not load this")
        ours = origin is None or origin.lower() in (f"http://{host.lower()}",
                                                    f"https://{host.lower()}")
        if not (ours or self.allowed_origin(headers)):
            raise APIError(403, f"the site {origin!r:.100} may not use this server: start the "
                                "server with --allow-origin if it may")

    def allowed_origin(self, headers: Headers) -> str | None:
        """The origin of the request if --allow-origin names it; "*" if it names all sites; else
        None."""
        return next((origin for origin in (headers.get("Origin"), "*") if origin in self.origins),
                    None)

    def prefix(self, headers: Headers, path: str) -> str:
        """The prefix of all that this client may see. We compare with every key, in constant time.

        APIError if the client needs a key for this path and sends none of ours. Our page and
        /health are open to all."""
        if path in ("/", "/health"):
            return ""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        sent = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        keys = self.metrics_keys if path == "/metrics" else self.keys
        prefixes = [prefix for key, prefix in keys if hmac.compare_digest(sent, key)]
        if self.keys and not prefixes:
            raise APIError(401, "the API key is missing or wrong: send the header Authorization: "
                                "Bearer KEY", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})
        return prefixes[0] if prefixes else ""

    def cors(self, headers: Headers) -> dict[str, str]:
        """The headers with which a browser lets the page of an allowed site read our answer."""
        if not (origin := self.allowed_origin(headers)):
            return {}
        asked = " ".join(headers.get("Access-Control-Request-Headers", "").split())
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin",
                "Access-Control-Allow-Methods": "GET, POST, DELETE",
                "Access-Control-Allow-Headers": asked,
                "Access-Control-Max-Age": "600"}


def check_key(name: str, key: str):
    require(re.fullmatch(r"\S+", key), name, "a text without blanks, and not empty", key)


def prefix_of(key: str) -> str:
    """The names of all conversations of this API key begin with it. The key itself is stored
    nowhere."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}/"


def name_of(host: str) -> str:
    """The name in a Host header: "localhost:8000" -> "localhost", "[::1]:8000" -> "::1"."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def page_policy(page: str) -> str:
    """The Content-Security-Policy of our page: the page runs its own script, and no script that
    somebody has written into a message; it talks to this server alone; no other page may frame
    it."""
    scripts = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
               for script in re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL)]
    sources = " ".join(f"'sha256-{digest}'" for digest in scripts)
    return (f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
