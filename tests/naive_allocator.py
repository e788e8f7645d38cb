"""A second, naive model of PyTorch's caching allocator, to check the first one against.

Written from c10/cuda/CUDACachingAllocator.cpp as a list of segments that are lists of cells, without links, pools or
keys: every question is answered by scanning all cells. Shares no code with planner/allocator.
"""

from msgspec import Struct, field

MIB = 2**20


class Cell(Struct):
    """A range of a segment. `state`: "used", "free" or "unmapped"."""

    size: int
    state: str
    name: int = -1  # the allocation that uses it


class Segment(Struct):
    base: int
    small: bool
    stream: int
    expandable: bool
    cells: list[Cell] = field(default_factory=list)

    @property
    def page(self) -> int:
        return 2 * MIB if self.small else 20 * MIB

    def starts(self) -> list[int]:
        found, at = [], self.base
        for cell in self.cells:
            found.append(at)
            at += cell.size
        return found


class NaiveAllocator:
    def __init__(self, card: int, expandable: bool) -> None:
        self.card = card
        self.expandable = expandable
        self.segments: list[Segment] = []
        self.next_base = 0

    # -- what can be read ----------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return sum(cell.size for segment in self.segments for cell in segment.cells if cell.state != "unmapped")

    @property
    def allocated(self) -> int:
        return sum(cell.size for segment in self.segments for cell in segment.cells if cell.state == "used")

    # -- what can be done ----------------------------------------------------------------------------------------------

    def allocate(self, name: int, size: int, stream: int = 0) -> bool:
        size = self.round(size)
        small = size <= MIB
        place = self.find(small, size, stream)
        if place is None:
            place = self.grow(small, size, stream)
        if place is None:
            self.empty_cache()
            place = self.grow(small, size, stream)
        if place is None:
            return False
        segment, index = place
        cell = segment.cells[index]
        left = cell.size - size
        if left >= 512 if (small or self.expandable) else left > MIB:
            segment.cells[index : index + 1] = [
                Cell(size, "used", name=name),
                Cell(left, "free"),
            ]
        else:
            segment.cells[index] = Cell(cell.size, "used", name=name)
        return True

    def free(self, name: int) -> None:
        for segment in self.segments:
            for cell in segment.cells:
                if cell.state == "used" and cell.name == name:
                    cell.state = "free"
                    self.join(segment)
                    return
        raise KeyError(name)

    def empty_cache(self) -> None:
        for segment in self.segments:
            if segment.expandable:
                self.unmap(segment)
        self.segments = [
            segment
            for segment in self.segments
            if not (len(segment.cells) == 1 and segment.cells[0].state in ("free", "unmapped"))
        ]

    # -- how -----------------------------------------------------------------------------------------------------------

    def round(self, size: int) -> int:
        return 512 if size < 512 else (size + 511) // 512 * 512

    def places(self, small: bool, size: int, stream: int) -> list[tuple[int, int, int, Segment, int]]:
        """Free cells with room: their size, address, the size that they could grow to, segment and index."""
        places = []
        for segment in self.segments:
            if segment.small != small or segment.stream != stream:
                continue
            for index, (cell, start) in enumerate(zip(segment.cells, segment.starts(), strict=True)):
                if cell.state == "free" and cell.size >= size:
                    after = segment.cells[index + 1] if index + 1 < len(segment.cells) else None
                    growth = after.size if after is not None and after.state == "unmapped" else 0
                    places.append((cell.size, start, cell.size + growth, segment, index))
        return sorted(places, key=lambda place: place[:2])

    def find(self, small: bool, size: int, stream: int) -> tuple[Segment, int] | None:
        """Best fit: by size, then address; of expandable segments by the size that a cell could grow to."""
        places = self.places(small, size, stream)
        if not places:
            return None
        best = 0
        while places[best][3].expandable and best + 1 < len(places) and places[best + 1][2] < places[best][2]:
            best += 1
        _, _, _, segment, index = places[best]
        return segment, index

    def grow(self, small: bool, size: int, stream: int) -> tuple[Segment, int] | None:
        own = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        segment_size = 2 * MIB if small else 20 * MIB if size < 10 * MIB else own
        if self.expandable:
            return self.expand(small, size, stream)
        if self.reserved + segment_size > self.card:
            return None
        segment = Segment(self.next_base, small, stream, False, [Cell(segment_size, "free")])
        self.next_base += segment_size
        self.segments.append(segment)
        return segment, 0

    def expand(self, small: bool, size: int, stream: int) -> tuple[Segment, int] | None:
        for segment in self.segments:  # in the order of their addresses
            if segment.small != small or segment.stream != stream or not segment.expandable:
                continue
            for index, cell in enumerate(segment.cells):
                if cell.state != "unmapped":
                    continue
                first = index - 1 if index and segment.cells[index - 1].state == "free" else index
                room, last = 0, first
                while room < size and last < len(segment.cells) and segment.cells[last].state != "used":
                    room, last = room + segment.cells[last].size, last + 1
                if room >= size:
                    return self.fill(segment, segment.starts()[first], size)
        page = 2 * MIB if small else 20 * MIB
        space = (self.card + self.card // 8 + page - 1) // page * page
        segment = Segment(self.next_base, small, stream, True, [Cell(space, "unmapped")])
        self.next_base += space
        self.segments.append(segment)
        return self.fill(segment, segment.base, size)

    def fill(self, segment: Segment, start: int, size: int) -> tuple[Segment, int] | None:
        """Map the unmapped pages behind `start` until `size` is free there."""
        while True:
            index = segment.starts().index(start)
            cell = segment.cells[index]
            if cell.state == "free":
                if cell.size >= size:
                    return segment, index
                needed, index = size - cell.size, index + 1
                cell = segment.cells[index]
            else:
                needed = size
            needed = min(needed, cell.size)
            mapped = (needed + segment.page - 1) // segment.page * segment.page
            if self.reserved + mapped > self.card:
                return None
            left = cell.size - mapped
            segment.cells[index : index + 1] = [Cell(mapped, "free")] + ([Cell(left, "unmapped")] if left else [])
            self.join(segment)

    def unmap(self, segment: Segment) -> None:
        cells = []
        for cell, start in zip(segment.cells, segment.starts(), strict=True):
            offset = start - segment.base
            low = (offset + segment.page - 1) // segment.page * segment.page
            high = (offset + cell.size) // segment.page * segment.page
            if cell.state != "free" or high <= low:
                cells.append(cell)
                continue
            pieces = ((low - offset, "free"), (high - low, "unmapped"), (offset + cell.size - high, "free"))
            cells += [Cell(length, state) for length, state in pieces if length]
        segment.cells = cells
        self.join(segment)

    def join(self, segment: Segment) -> None:
        cells: list[Cell] = []
        for cell in segment.cells:
            if cells and cell.state == cells[-1].state != "used":
                cells[-1] = Cell(cells[-1].size + cell.size, cell.state)
            else:
                cells.append(cell)
        segment.cells = cells
