"""Homes in DRAM that lie packed, which what is trained is written to and brought up from.

See :mod:`tiermem.core.packedhome`. A home is packed as its block is written there, and unpacked as
the host looks at it. :attr:`tiermem.runtime.memory.homes.Homes.packed` says which homes lie packed.
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
        packs: Whether blocks are written home packed; homes that are stay so without.
    """

    def __init__(self, homes: Homes, copy: CopyEngine) -> None:
        """Packs nothing yet."""
        self.packs = False
        self._homes = homes
        self._copy = copy
        self._flags: Extent | None = None  # says which tiles of homes are raw
        self._raw = self._seen = 0  # its address, and where kernels look at it
        self._forms: dict[tuple[int, int], PackedHome] = {}
        homes.owners.append(self._owned)
        homes.unpack = self._unpack

    @property
    def has_dram(self) -> bool:
        """Whether it has room there, which says what it has to know of homes."""
        return self._flags is not None

    def begin(self, seen: int | None) -> bool:
        """Has blocks written home packed from now on, if that can be done.

        Args:
            seen: Address of device memory, ``flags_nbytes`` of DRAM's capacity, for what kernels
                are to know of homes; none where they look at what the host knows.

        Returns:
            Whether it can: not where DRAM has no room to spare, or kernels do not see it at the
            addresses that the host has for it.
        """
        if self._flags is None:
            extent = self._homes.lend(flags_nbytes(self._homes.dram.capacity), spare=True)
            if extent is None:
                return False
            flags = self._homes.arena.bytes_of(extent)
            if self._copy.seen(flags) is None:  # kernels look at homes as well
                self._homes.release(Tier.DRAM, extent)
                return False
            self._flags, self._raw = extent, flags.data_ptr()
        self._seen = seen or self._raw
        self._forms.clear()
        self.packs = True
        return True

    def stop(self) -> None:
        """Has blocks written home as they are from now on, without device memory."""
        self.packs = False
        self._seen = self._raw
        self._forms.clear()

    def end(self) -> None:
        """Unpacks all homes, and gives back what it has."""
        for offset, nbytes in list(self._homes.packed.items()):
            self._homes.open(Extent(offset, nbytes))
        self.stop()
        if self._flags is not None:
            self._copy.synchronize()
            extent, self._flags = self._flags, None
            self._homes.release(Tier.DRAM, extent)

    def form_for(self, record: Record, home: Extent) -> PackedHome | None:
        """Returns where a block is written to, packed, and notes that its home is to lie so.

        Args:
            record: The block, which is about to be written home.
            home: Its home.

        Returns:
            None where it is written as it is, which is noted as well.
        """
        nbytes = record.block.nbytes
        if not self.packs or not record.packs or nbytes % ALIGNED:
            self._homes.packed.pop(home.offset, None)
            return None
        self._homes.packed[home.offset] = nbytes
        return self._form(home.offset, nbytes)

    def form_of(self, home: Extent) -> PackedHome:
        """Returns the form of a home that lies packed."""
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
        """Unpacks a home, once nothing is copied any more."""
        form = self.form_of(home)
        self._copy.synchronize()

        def open_it() -> None:
            self._copy.open_home(form)
            del self._homes.packed[home.offset]

        undisturbed(open_it)  # cut short, it would be neither packed nor as it is

    def _owned(self) -> Iterator[tuple[Tier, Extent]]:
        if self._flags is not None:
            yield Tier.DRAM, self._flags
