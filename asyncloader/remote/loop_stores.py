"""Stores for each event loop that reads. Data path: dataset -> [loop_stores] -> stores -> transport.

A transport belongs to one loop. A dataset without workers may be read by several iterators at a time, in one loop or
in several; what one of them ends must not be taken from the others.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from asyncloader.remote.stores import Stores

__all__ = ["LoopStores"]


class LoopStores:
    """Gives each loop stores of its own, and closes them when the last who uses them there has left. Pickles.

    Args:
        stores: what they are all like. A transport of the user's own is the same in all of them.
    """

    def __init__(self, stores: Stores) -> None:
        self.template = stores
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), (self.template,)

    def here(self) -> Stores:
        """Those of the running loop; somebody has entered."""
        return self._shared().stores

    def enter(self) -> None:
        """They are used in the running loop from now on."""
        self._shared().users += 1

    async def leave(self) -> None:
        """They are not any more, by one who entered. Errors as `Stores.aclose`."""
        loop = asyncio.get_running_loop()
        shared = self._shared()
        shared.users -= 1
        if shared.users <= 0:
            del self._open[loop]  # at once: who enters meanwhile gets others
            await shared.stores.aclose()

    def _shared(self) -> _Shared:
        loop = asyncio.get_running_loop()
        shared = self._open.get(loop)
        if shared is None:
            shared = self._open[loop] = _Shared(self.template)
        return shared


class _Shared:
    def __init__(self, template: Stores) -> None:
        self.stores = template.fresh()
        self.users = 0
