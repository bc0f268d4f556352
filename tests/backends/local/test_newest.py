"""The newest entries are kept within their bytes, also if threads share them."""

import sys
from concurrent.futures import ThreadPoolExecutor

from practicum.backends.local.newest import NewestEntries


def test_entries_are_kept_up_to_their_bytes_and_the_oldest_go_first() -> None:
    entries = NewestEntries[str, int](10)
    for number, name in enumerate("abc"):
        entries.put(name, number, 4)
    assert [entries.get(name) for name in "abc"] == [None, 1, 2]
    entries.get("b")
    entries.put("d", 3, 4)
    assert [entries.get(name) for name in "bcd"] == [1, None, 3]
    entries.put("b", 4, 1)
    entries.put("e", 5, 4)
    assert [entries.get(name) for name in "bde"] == [4, 3, 5]


def test_threads_share_the_entries_and_their_bytes() -> None:
    entries = NewestEntries[int, int](50)

    def work(start: int) -> None:
        for number in range(start, start + 3000):
            entries.put(number % 40, number, 1 + number % 7)
            entries.get(number % 37)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    kept = dict(entries._entries)
    assert entries._nbytes == sum(nbytes for _, nbytes in kept.values()) <= 50
