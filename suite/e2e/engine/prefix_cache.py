"""The prefix cache: a radix tree over virtual pages, so that a prompt's known beginning is not computed again.

An edge is one page of tokens. The tree is one more holder of every page in it; a request that reuses a prefix
shares its pages, and pages that only the tree holds are given back, least recently used leaves first.

Not every prefix is reusable. A window layer needs the rows of the last window before the prefix ends; the tree
tombstones older ones first (window rows that no leaf's window covers) when room is short. A recurrent layer needs
the state exactly at the prefix's end: a snapshot with its position, taken at a block end.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from suite.errors import InvariantError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.allocators.slots import SlotAllocator, Snapshot


class Node:
    """One page of some prefix. `reads`: whether the tree reads its window rows."""

    __slots__ = ("children", "depth", "key", "page", "parent", "reads", "snapshot", "used")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[tuple[int, ...], Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.snapshot: Snapshot | None = None
        self.reads = False
        self.used = 0


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A reusable prefix: its pages, and the state at its end where the model has recurrent layers."""

    pages: list[int]
    snapshot: Snapshot | None = None


class PrefixCache:
    """`slots`: the state slots of a model with recurrent layers, else None."""

    def __init__(self, allocator: PageAllocator, slots: SlotAllocator | None = None) -> None:
        self.allocator, self.slots = allocator, slots
        self.page_size = allocator.page_size
        window = allocator.pool.geometry.window
        self.window = None if window is None else window.window
        self.root = Node(None, (), 0)
        self.size = self.snapshots = 0  # pages and snapshots that the tree holds
        self._clock = itertools.count(1)

    # -- use -------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], most: int) -> Prefix:
        """The longest reusable prefix of `tokens[:most]`. Nothing is shared yet: the caller does, at once."""
        path = list(self._path(tokens, most))
        now = next(self._clock)
        for node in path:
            node.used = now
        while path and not self._is_reusable(path):
            path.pop()
        if not path:
            return Prefix(pages=[])
        snapshot = path[-1].snapshot if self.slots is not None else None
        if snapshot is not None and snapshot.position != len(path) * self.page_size:
            raise InvariantError(f"snapshot position {snapshot.position} != prefix {len(path) * self.page_size}")
        return Prefix(pages=[node.page for node in path], snapshot=snapshot)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], snapshot: Snapshot | None = None) -> None:
        """Keep the whole pages of `tokens`, whose rows are in `pages`; the tree becomes one more holder of new ones.

        A page that is there already keeps its place, unless only the newer one still has its window rows. Takes
        over `snapshot`.
        """
        node, now = self.root, next(self._clock)
        for index in range(len(tokens) // self.page_size):
            key = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            child, page = node.children.get(key), pages[index]
            if child is None:
                child = node.children[key] = Node(node, key, page)
                self._hold(child)
                self.size += 1
            elif child.page != page and self.window and not self._stands(child) and self.allocator.has_window(page):
                self._let_go([child])
                child.page = page
                self._hold(child)
            child.used, node = now, child
            if snapshot is not None and snapshot.position == node.depth * self.page_size:
                self._drop_snapshot(node)
                node.snapshot, snapshot = snapshot, None
                self.snapshots += 1
        if snapshot is not None:
            raise InvariantError(f"snapshot position {snapshot.position} is no block end within {len(tokens)} tokens")

    # -- room ------------------------------------------------------------------------------------

    def reclaimable(self) -> int:
        """Pages that evicting the whole tree would surely give back, window rows and all."""
        holders, has_window = self.allocator.holders, self.allocator.has_window
        return sum(holders(node.page) == 1 and (self.window is None or has_window(node.page)) for node in self._nodes())

    def evict(self, is_short: Callable[[], bool]) -> bool:
        """Give back the least recently used leaves until nothing `is_short`; False when the tree is empty before."""
        order = itertools.count()
        leaves = [(node.used, next(order), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        while is_short():
            if not leaves:
                return False
            node = heapq.heappop(leaves)[2]
            self._remove(node)
            parent = node.parent
            if parent is not None and parent is not self.root and not parent.children:
                heapq.heappush(leaves, (parent.used, next(order), parent))
        return True

    def tombstone(self, is_short: Callable[[], bool]) -> bool:
        """Give back window rows that no leaf's window covers, least recently used first; False when none is left."""
        if self.window is None:
            return False
        covered = self._covered_by_leaves()
        idle = sorted((node for node in self._nodes() if node.reads and node not in covered), key=lambda n: n.used)
        for node in idle:
            if not is_short():
                return True
            node.reads = False
            self.allocator.evict_window([node.page])
        return not is_short()

    def evict_snapshot(self) -> bool:
        """Give back the least recently used state snapshot; False when there is none."""
        kept = [node for node in self._nodes() if node.snapshot is not None]
        if not kept:
            return False
        self._drop_snapshot(min(kept, key=lambda node: node.used))
        return True

    def pages(self) -> list[int]:
        """Every page that the tree holds."""
        return [node.page for node in self._nodes()]

    def clear(self) -> None:
        """Give everything back."""
        nodes = list(self._nodes())
        for node in nodes:
            self._drop_snapshot(node)
        self._let_go(nodes)
        self.root.children.clear()
        self.size = 0

    def check(self) -> None:
        """Raise InvariantError where a leaf is not reusable, or a page is not held."""
        nodes = list(self._nodes())
        if len(nodes) != self.size or len({node.page for node in nodes}) != self.size:
            raise InvariantError(f"prefix cache: size {self.size} != nodes {len(nodes)}, each with a page of its own")
        if (kept := sum(node.snapshot is not None for node in nodes)) != self.snapshots:
            raise InvariantError(f"prefix cache: snapshots {self.snapshots} != nodes with one {kept}")
        for node in nodes:
            if not self.allocator.holders(node.page):
                raise InvariantError(f"prefix cache: page {node.page} has no holder")
            if node.snapshot is not None and node.snapshot.position != node.depth * self.page_size:
                raise InvariantError(
                    f"prefix cache: snapshot position {node.snapshot.position} != depth {node.depth} * {self.page_size}"
                )

    # -- inside ----------------------------------------------------------------------------------

    def _path(self, tokens: Sequence[int], most: int) -> Iterator[Node]:
        node = self.root
        for begin in range(0, most - self.page_size + 1, self.page_size):
            child = node.children.get(tuple(tokens[begin : begin + self.page_size]))
            if child is None:
                return
            node = child
            yield node

    def _is_reusable(self, path: list[Node]) -> bool:
        if self.slots is not None and path[-1].snapshot is None:
            return False
        return all(self._stands(node) for node in path[self._first_seen(len(path)) :])

    def _first_seen(self, depth: int) -> int:
        """The first of `depth` pages that the next token's window reaches; `depth` without a window."""
        return depth if self.window is None else max(0, depth * self.page_size - self.window + 1) // self.page_size

    def _covered_by_leaves(self) -> set[Node]:
        covered: set[Node] = set()
        for leaf in self._nodes():
            if leaf.children:
                continue
            node: Node | None = leaf
            for _ in range(leaf.depth - self._first_seen(leaf.depth)):
                assert node is not None  # no leaf sees more pages than its depth
                covered.add(node)
                node = node.parent
        return covered

    def _stands(self, node: Node) -> bool:
        return self.allocator.has_window(node.page)

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _hold(self, node: Node) -> None:
        self.allocator.share([node.page])
        node.reads = self.window is not None and self._stands(node)

    def _let_go(self, nodes: list[Node]) -> None:
        self.allocator.evict_window([node.page for node in nodes if node.reads])
        self.allocator.free([node.page for node in nodes])

    def _remove(self, node: Node) -> None:
        self._drop_snapshot(node)
        self._let_go([node])
        assert node.parent is not None  # the root is never a leaf to evict
        del node.parent.children[node.key]
        self.size -= 1

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot is not None and self.slots is not None:
            self.slots.drop(node.snapshot)
            node.snapshot = None
            self.snapshots -= 1
