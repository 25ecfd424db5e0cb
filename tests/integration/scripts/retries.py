"""``small.py``, where in every step a worker loses a link, so that every step needs a new view."""

import runpy
from pathlib import Path

from everstep.engine.tcp import TcpLinks, _cut

plain = TcpLinks.send
broken: set[int] = set()


def send(self, target, parcel):  # type: ignore[no-untyped-def]
    key = parcel.key
    if key.kind == "part" and key.step % 3 != 2 and key.step not in broken and self._node == "n0" and self._outgoing:
        broken.add(key.step)
        _cut(next(iter(self._outgoing.values())))
    plain(self, target, parcel)


TcpLinks.send = send  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("small.py")), run_name="__main__")
