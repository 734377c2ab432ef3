"""How the machines of a launch find each other, according to the caller's options."""

from __future__ import annotations

from collections.abc import Mapping

from mlaunch.base.log import log
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol import token as tokens
from mlaunch.protocol.spec import Rendezvous
from mlaunch.rendezvous.store_keys import limit_of


def rendezvous(options: Options, environ: Mapping[str, str], name: str) -> Rendezvous:
    """Return where the machines of a launch meet, and with which token they join. ValueError for an invalid token."""
    token, source = options.token, "token="
    if token is None:
        token, source = environ.get(tokens.VARIABLE), tokens.VARIABLE
    tokens.check(token, source)
    if not token and options.rank_start == 0:
        log.warning(
            "%s has no token: anybody who reaches %s, port %s may join it", name, options.master_ip, options.port
        )
    if token and len(token) < tokens.SHORTEST:
        log.warning("%s: %s has %d characters, which others may guess; %s", name, source, len(token), tokens.ADVICE)
    key = tokens.key_of(token) if token else None
    times = options.join_timeout, options.heartbeat_timeout
    host = options.master_ip.strip("[]")  # around an IPv6 address, as in URLs
    return Rendezvous(host, options.port, key, *times, store_limit=None if key else limit_of(environ))
