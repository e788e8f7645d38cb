"""A second, naive model of PyTorch's caching allocator, to check the first one against.

Written from c10/cuda/CUDACachingAllocator.cpp as a list of segments that are lists of cells, without links, pools or
keys: every question is answered by scanning all cells. Shares no code with planner/allocator.
"""

from dataclasses import dataclass, field

MIB = 2**20


@dataclass
class Cell:
    """A range of a segment. `state`: "used", "free" or "unmapped"; `since`: the search count when it became free."""

    size: int
    state: str
    since: int = 0
    name: int = -1  # the allocation that uses it


def power_below(number: int) -> int:
    """The largest power of two that is not above a number, as its exponent."""
    power = 0
    while 2 ** (power + 1) <= number:
        power += 1
    return power


@dataclass
class Segment:
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
    def __init__(self, card: int, **settings: object) -> None:
        self.card = card
        self.expandable = bool(settings.get("expandable_segments", False))
        self.max_split = int(settings.get("max_split_size_bytes", 2**62))  # type: ignore[call-overload]
        self.rounding = int(settings.get("max_non_split_rounding_bytes", 20 * MIB))  # type: ignore[call-overload]
        self.threshold = float(settings.get("garbage_collection_threshold", 0.0))  # type: ignore[arg-type]
        self.fraction = float(settings.get("memory_fraction", 0.0))  # type: ignore[arg-type]
        self.divisions = tuple(settings.get("roundup_power2_divisions", ()))  # type: ignore[arg-type]
        self.segments: list[Segment] = []
        self.next_base = 0
        self.searches = {True: 0, False: 0}

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
        if self.collects:
            self.searches[small] += 1
        place = self.find(small, size, stream)
        if place is None:
            self.collect()
            place = self.grow(small, size, stream)
        if place is None and self.release_some(small, size, stream):
            place = self.grow(small, size, stream)
        if place is None:
            self.empty_cache()
            place = self.grow(small, size, stream)
        if place is None:
            return False
        segment, index = place
        cell = segment.cells[index]
        left = cell.size - size
        if left >= 512 if (small or self.expandable) else size < self.max_split and left > MIB:
            segment.cells[index : index + 1] = [
                Cell(size, "used", name=name),
                Cell(left, "free", self.searches[small]),
            ]
        else:
            segment.cells[index] = Cell(cell.size, "used", name=name)
        return True

    def free(self, name: int) -> None:
        for segment in self.segments:
            for cell in segment.cells:
                if cell.state == "used" and cell.name == name:
                    cell.state, cell.since = "free", self.searches[segment.small]
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
        if size < 512:
            return 512
        power = power_below(size)
        divisions = self.divisions[max(0, min(power - 20, 15))] if self.divisions else 0
        if divisions <= 1 or size <= 512 * divisions:
            return (size + 511) // 512 * 512
        if size == 2**power:
            return size
        step = 2**power // 2 ** power_below(divisions)
        if step == 0:
            return 2 * 2**power
        return size if size % step == 0 else (size // step + 1) * step

    @property
    def collects(self) -> bool:
        return self.fraction > 0 and self.threshold > 0

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
        chosen, _, _, segment, index = places[best]
        if size < self.max_split and chosen >= self.max_split:
            return None
        if size >= self.max_split and chosen >= size + self.rounding:
            return None
        return segment, index

    def grow(self, small: bool, size: int, stream: int) -> tuple[Segment, int] | None:
        own = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        segment_size = 2 * MIB if small else 20 * MIB if size < 10 * MIB else own
        if self.fraction and self.reserved + segment_size > int(self.fraction * self.card):
            return None
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
            segment.cells[index : index + 1] = [Cell(mapped, "free", self.searches[segment.small])] + (
                [Cell(left, "unmapped")] if left else []
            )
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
            now = self.searches[segment.small]
            pieces = ((low - offset, "free"), (high - low, "unmapped"), (offset + cell.size - high, "free"))
            cells += [Cell(length, state, now) for length, state in pieces if length]
        segment.cells = cells
        self.join(segment)

    def collect(self) -> None:
        if not self.collects:
            return
        target = self.reserved - int(self.threshold * int(self.fraction * self.card))
        reclaimed = 0
        while reclaimed < target:
            whole = [s for s in self.segments if not s.small and len(s.cells) == 1 and s.cells[0].state == "free"]
            if not whole:
                return
            ages = [self.searches[False] - segment.cells[0].since for segment in whole]
            gone = [segment for segment, age in zip(whole, ages, strict=True) if age >= sum(ages) / len(ages)]
            reclaimed += sum(segment.cells[0].size for segment in gone)
            self.segments = [segment for segment in self.segments if segment not in gone]

    def release_some(self, small: bool, size: int, stream: int) -> bool:
        if self.max_split == 2**62:
            return False
        wanted = max(size, self.max_split)
        free = sorted(
            (
                (cell.size, start, segment)
                for segment in self.segments
                if segment.small == small and segment.stream == stream
                for cell, start in zip(segment.cells, segment.starts(), strict=True)
                if cell.state == "free"
            ),
            key=lambda place: place[:2],
        )
        larger = [place for place in free if place[0] >= wanted]
        gone = larger[:1]
        if not larger:
            total = 0
            for place in reversed(free):
                if total >= wanted or place[0] < self.max_split:
                    break
                total += place[0]
                gone.append(place)
        self.segments = [segment for segment in self.segments if all(segment is not place[2] for place in gone)]
        return sum(place[0] for place in gone) >= wanted

    def join(self, segment: Segment) -> None:
        cells: list[Cell] = []
        for cell in segment.cells:
            if cells and cell.state == cells[-1].state != "used":
                cells[-1] = Cell(cells[-1].size + cell.size, cell.state, max(cells[-1].since, cell.since))
            else:
                cells.append(cell)
        segment.cells = cells
