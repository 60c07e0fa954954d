"""Common parts of the benchmarks: timing and reports. Results are checked before anything is
timed."""

import argparse
import ctypes
import json
import os
import platform
import statistics
import time

import rmsnorm


def arguments(description, **defaults):
    """The options of a benchmark. Each has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (defaults | dict(rounds=25, out="")).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def keep_freed_memory():
    """Makes glibc keep freed memory. Otherwise some results are in new pages, which the kernel
    zeroes first, depending on chance."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)


def _summary(times):
    """{name: (median time, least time, median ratio to the first name's times)}."""
    first = times[next(iter(times))]
    return {
        name: dict(us=statistics.median(found), least_us=min(found),
                   ratio=statistics.median(theirs / ours for theirs, ours in zip(found, first)))
        for name, found in times.items()
    }


def in_turn(calls, rounds, seconds):
    """Times calls in turn, in us: {name: summary}.

    The speed of a machine drifts, but ratios of successive samples do not. A sample repeats a call
    for `seconds`.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            call()
            count += 1
        repeats[name] = max(count, 1)
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name] * 1e6)
    return _summary(times)


def queued(calls, rounds, length, torch):
    """`in_turn` for a CUDA device: `length` calls are queued behind a pause, which hides the host's
    time."""
    times = {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)
            start.record()
            for _ in range(length):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / length * 1e3)
    return _summary(times)


def report(device, rows, **versions):
    """A report: the rows with the machine, the device, the commit of this package and the versions
    of the frameworks."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    machine = dict(os=platform.system().lower(), arch=platform.machine(), processor=names[0] if names else None, threads=os.cpu_count(),
                   load=os.getloadavg()[0])
    return dict(machine=machine, device=device, revision=rmsnorm.__revision__, python=platform.python_version(), **versions, rows=rows)


def show(title, rows):
    """Prints a table. The ratios compare with the first row."""
    print(title)
    for name, found in rows.items():
        print(f"    {name:34s} {found['us']:10.2f} us   least {found['least_us']:10.2f}   x first {found['ratio']:6.2f}", flush=True)


def write(path, report):
    """Writes the report to a file, if a path is given."""
    if path:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
