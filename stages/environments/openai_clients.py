"""Clients of OpenAI's package for agents (chat_agent.py), which share their connections.

Making a client takes 50 ms of a processor, and a copy of one 0.1 ms: where hundreds of episodes
begin at the same time, each with a client of its own, that is what they wait for. A client waits
for its answer as long as all others of its unit take, and asks nothing twice; all episodes may wait
at the same time; no connection outlives its answer, as episodes end and loops do.
"""

import asyncio
from asyncio import AbstractEventLoop
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stages.environments.environment import NoAnswer

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_NOWHERE = "http://127.0.0.1:9"
_of_loops: "WeakKeyDictionary[AbstractEventLoop, AsyncOpenAI]" = WeakKeyDictionary()


def client(base_url: str) -> "OpenAI":
    """For agents that are ordinary functions."""
    return _first().with_options(base_url=base_url)


def async_client(base_url: str) -> "AsyncOpenAI":
    """For `async` agents: connections belong to the loop that they are used on."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        openai = _openai()
        http = openai.DefaultAsyncHttpxClient(limits=_limits(openai))
        _of_loops[loop] = openai.AsyncOpenAI(**_settings(), http_client=http)
    return _of_loops[loop].with_options(base_url=base_url)


@cache
def _first() -> "OpenAI":
    openai = _openai()
    made: OpenAI = openai.OpenAI(
        **_settings(), http_client=openai.DefaultHttpxClient(limits=_limits(openai))
    )
    return made


def _settings() -> dict[str, Any]:
    return {"base_url": _NOWHERE, "api_key": "none", "timeout": None, "max_retries": 0}


def _limits(openai: Any) -> Any:
    """Of the class that this version of openai has connections from."""
    return type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=0)


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise NoAnswer(f"openai cannot be imported ({error}): pip install openai") from None
    return openai
