"""The meter of a node's traffic, stored by day in traffic.json."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import date
from pathlib import Path
from typing import Final

from echo_node.core.traffic import Amount, Traffic, TrafficByDate
from echo_node.host.trouble_log import TroubleLog
from echo_shared.files.atomic import disk_error, write_private
from echo_shared.swarm import Swarm

log = logging.getLogger(__name__)

SAVE_S: Final = 5.0
"""Seconds between two writes. A power cut loses the count of at most this time."""
_PART: Final = "the count of traffic"


class TrafficMeter:
    """Counts sent and received bytes, on the event loop. Call `count` for each message; `run` adds the bytes of the
    BitTorrent swarm, and saves the counts.
    """

    def __init__(self, file: Path, troubles: TroubleLog) -> None:
        self._file = file
        self._troubles = troubles
        self._ledger = TrafficByDate(_load(file))
        self._swarm = Amount()
        self._is_saved = True

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        if sent or received:
            self._ledger.add(Amount(sent, received), _today())
            self._is_saved = False

    def now(self) -> Traffic:
        """Return the bytes sent and received on the current day and in its month, by this machine's calendar."""
        return self._ledger.now(_today())

    async def run(self, swarm: Swarm) -> None:
        """Add the bytes of the BitTorrent swarm regularly, and save the counts, until cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                sent, received = await swarm.traffic()
                self.count(sent=sent - self._swarm.sent, received=received - self._swarm.received)
                self._swarm = Amount(sent, received)
                self.save()
        finally:
            self.save()

    def save(self) -> None:
        """Write the counts if they have changed. A failure is reported, and the write retried later."""
        if self._is_saved:
            return
        days = {day.isoformat(): [amount.sent, amount.received] for day, amount in self._ledger.days.items()}
        try:
            write_private(self._file, f"{json.dumps(days, indent=1)}\n".encode())
        except OSError as error:
            what = "The count of traffic cannot be written; counting continues."
            self._troubles.met(_PART, disk_error(what, self._file.parent, got=str(error), code=error.errno))
            return
        self._is_saved = True
        self._troubles.end(_PART)


def _today() -> date:
    return date.today()


def _load(file: Path) -> dict[date, Amount]:
    """Return the stored counts by day. A damaged file counts as empty."""
    try:
        days = json.loads(file.read_text(encoding="utf-8"))
        return {date.fromisoformat(day): Amount(int(sent), int(received)) for day, (sent, received) in days.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("The count of traffic restarts at zero: %s: %s", file, error)
        return {}
