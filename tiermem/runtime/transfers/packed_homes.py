"""Homes in DRAM that are stored packed: trained blocks are written there and fetched from there.

See :mod:`tiermem.core.packedhome`. A home is packed when its block is written there, and unpacked
when the host reads it. :attr:`tiermem.runtime.memory.homes.Homes.packed` lists the packed homes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiermem.core.block import Extent, Tier
from tiermem.core.packedhome import ALIGNED, TILE, PackedHome, first_flag, flags_nbytes
from tiermem.core.record import Record
from tiermem.errors import InvariantError
from tiermem.runtime.base.undisturbed import undisturbed
from tiermem.runtime.memory.homes import Homes
from tiermem.transfer.copy import CopyEngine


class PackedHomes:
    """The packed form of homes; under the manager's lock.

    Attributes:
        packs: Whether blocks are written home packed; if not, packed homes stay packed.
    """

    def __init__(self, homes: Homes, copy: CopyEngine) -> None:
        """Starts with packing off."""
        self.packs = False
        self._homes = homes
        self._copy = copy
        self._flags: Extent | None = None  # says which tiles of homes are raw
        self._raw = self._seen = 0  # its address, and where kernels see it
        self._forms: dict[tuple[int, int], PackedHome] = {}
        homes.owners.append(self._owned)
        homes.unpack = self._unpack

    @property
    def has_dram(self) -> bool:
        """Whether it has its DRAM, which records the state of homes."""
        return self._flags is not None

    def begin(self, seen: int | None) -> bool:
        """Begins to write blocks home packed, if that is possible.

        Args:
            seen: Address of device memory, ``flags_nbytes`` of DRAM's capacity, for the
                flags that kernels read; None if they read those of the host.

        Returns:
            Whether it is possible: not if DRAM has no room to spare, or kernels do not see it at
            the addresses that the host has for it.
        """
        if self._flags is None:
            extent = self._homes.lend(flags_nbytes(self._homes.dram.capacity), spare=True)
            if extent is None:
                return False
            flags = self._homes.arena.bytes_of(extent)
            if self._copy.seen(flags) is None:  # kernels read homes as well
                self._homes.release(Tier.DRAM, extent)
                return False
            self._flags, self._raw = extent, flags.data_ptr()
        self._seen = seen or self._raw
        self._forms.clear()
        self.packs = True
        return True

    def stop(self) -> None:
        """Writes blocks home unpacked from now on, and uses no device memory."""
        self.packs = False
        self._seen = self._raw
        self._forms.clear()

    def end(self) -> None:
        """Unpacks all homes, and gives its memory back."""
        for offset, nbytes in list(self._homes.packed.items()):
            self._homes.open(Extent(offset, nbytes))
        self.stop()
        if self._flags is not None:
            self._copy.synchronize()
            extent, self._flags = self._flags, None
            self._homes.release(Tier.DRAM, extent)

    def form_for(self, record: Record, home: Extent) -> PackedHome | None:
        """Returns the packed form in which a block is written, and marks its home as packed.

        Args:
            record: The block, which is about to be written home.
            home: Its home.

        Returns:
            None if it is written unpacked, which is noted as well.
        """
        nbytes = record.block.nbytes
        if not self.packs or not record.packs or nbytes % ALIGNED:
            self._homes.packed.pop(home.offset, None)
            return None
        self._homes.packed[home.offset] = nbytes
        return self._form(home.offset, nbytes)

    def form_of(self, home: Extent) -> PackedHome:
        """Returns the form of a home that is stored packed."""
        return self._form(home.offset, self._homes.packed[home.offset])

    # -- inside ----------------------------------------------------------

    def _form(self, offset: int, nbytes: int) -> PackedHome:
        form = self._forms.get((offset, nbytes))
        if form is None:
            if not self._raw:
                raise InvariantError("a home lies packed, and nothing says which tiles are raw")
            tiles, rest = divmod(nbytes, TILE)
            address = self._homes.arena.bytes_of(Extent(offset, nbytes)).data_ptr()
            first = first_flag(offset)
            form = PackedHome(address, tiles, rest, self._raw + first, self._seen + first)
            self._forms[offset, nbytes] = form
        return form

    def _unpack(self, home: Extent) -> None:
        """Unpacks a home, after all copies have ended."""
        form = self.form_of(home)
        self._copy.synchronize()

        def open_it() -> None:
            self._copy.open_home(form)
            del self._homes.packed[home.offset]

        undisturbed(open_it)  # interrupted, it would be neither packed nor unpacked

    def _owned(self) -> Iterator[tuple[Tier, Extent]]:
        if self._flags is not None:
            yield Tier.DRAM, self._flags
