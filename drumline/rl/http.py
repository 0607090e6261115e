"""JSON over HTTP to a server of the cluster, by the standard library; every way of failing is one line."""

from __future__ import annotations

import base64
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from drumline.errors import DrumlineError, EnvironmentFault


class Server:
    """A server at `url`. Until `found` is set, what fails is the user's mistake (EnvironmentFault); after that, the run's (DrumlineError).

    Proxies are passed by: the server is the cluster's own. The key, where it wants one, is in VLLM_API_KEY, as for vLLM itself;
    user:password@ in the url are sent as HTTP's basic authentication.
    """

    def __init__(self, url: str, timeout_seconds: float, where: str) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        user, at, host = parts.netloc.rpartition("@")
        # http.client takes no user:password in an address, and a line that names the server may not have it.
        self.basic = base64.b64encode(urllib.parse.unquote(user).encode()).decode() if at else None
        self.url, self.timeout_seconds, self.where = parts._replace(netloc=host).geturl(), timeout_seconds, where
        self.found = False
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        """The JSON at `path`; None where the body is empty."""
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any], fixes: dict[int, str] | None = None) -> Any:
        """What the server answers to `body`. `fixes`: how to mend it, by HTTP status."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return self._ask(request, fixes)

    def _ask(self, request: urllib.request.Request, fixes: dict[int, str] | None = None) -> Any:
        if key := os.environ.get("VLLM_API_KEY"):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        elif self.basic:
            request.add_unredirected_header("Authorization", f"Basic {self.basic}")
        what = f"{request.get_method()} {request.full_url}"
        try:
            with self.opener.open(request, timeout=self.timeout_seconds) as answer:
                text = answer.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            raise self.fault(f"{what} was answered {error.code}: {_reason(error)}", (fixes or {}).get(error.code)) from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                raise self.fault(f"{what} took longer than {self.timeout_seconds:g} s", "raise timeout_seconds") from None
            raise self.fault(f"{what}: {cause or type(cause).__name__}", "start it with `vllm serve MODEL`, or mend the url") from None
        except ValueError:
            raise self.fault(f"{what} was answered with what is no JSON", "is it vLLM that listens there?") from None

    def fault(self, what: str, fix: str | None = None) -> DrumlineError:
        return (DrumlineError if self.found else EnvironmentFault)(what, where=self.where, fix=fix)


def _reason(error: urllib.error.HTTPError) -> str:
    """What the body of an error says, in vLLM's form or another, in 300 letters."""
    text = error.read().decode(errors="replace").strip()
    try:
        body = json.loads(text)
        inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except ValueError:
        return text[:300] or str(error.reason)
    return text[:300]
