"""The table of mutants, and the places of the runtime that have none, with the reason.

`MUTANTS` has for each place the runtime without it and, where the place matters, with it elsewhere or for less."""

from __future__ import annotations

from tests.accelerator.mutants.mutant import EXECUTION, Mutant, Place

ACCELERATOR, LINK = "runtime/accelerator.py", "runtime/coded_link.py"
MEMORY, SWAPPER, EXECUTOR = "runtime/registered_memory.py", "runtime/swapper.py", "runtime/executor.py"
MEASURE, BACKENDS, REPLAY = "runtime/measure.py", "backends/__init__.py", "runtime/replay.py"


def without(file: str, function: str, *lines: str, survives: str = "") -> Mutant:
    return Mutant(file, function, dict.fromkeys(lines, "pass"), survives)


def instead(file: str, function: str, line: str, new: str, survives: str = "") -> Mutant:
    return Mutant(file, function, {line: new}, survives)


MUTANTS = [
    # ---- a transfer and the device's end
    instead(ACCELERATOR, "AcceleratorTransfer.__init__",
            "self.begun = torch.Event(device, enable_timing=True) if timed else None", "self.begun = None"),
    instead(ACCELERATOR, "AcceleratorTransfer.__init__",
            "self.ended = torch.Event(device, enable_timing=timed)", "self.ended = torch.Event(device)"),
    instead(ACCELERATOR, "AcceleratorTransfer.has_ended",
            "return (self.asked is None or self.asked.ended) and self.ended.query()", "return True"),
    instead(ACCELERATOR, "AcceleratorTransfer.has_ended",
            "return (self.asked is None or self.asked.ended) and self.ended.query()", "return self.ended.query()"),
    instead(ACCELERATOR, "AcceleratorTransfer.has_ended",
            "return (self.asked is None or self.asked.ended) and self.ended.query()", "return False"),
    without(ACCELERATOR, "_Work.give_back", "self.coded.close()"),
    without(ACCELERATOR, "_Work.give_back", "self.streams.synchronize()"),
    without(ACCELERATOR, "_Work.give_back", "held.clear()"),
    instead(ACCELERATOR, "_Work.give_back", "self.streams.synchronize()",
            "[held.clear() for held in self.in_flight]\nself.streams.synchronize()",
            survives="between the two, nothing is given to the device that could take the freed blocks"),
    instead(ACCELERATOR, "AcceleratorDevice.__init__",
            "self._close = weakref.finalize(self, self._work.give_back)",
            "self._close = weakref.finalize(self, lambda: None)"),
    without(ACCELERATOR, "AcceleratorDevice._warm_up", "self._compute.synchronize()"),
    # ---- iterations
    without(ACCELERATOR, "AcceleratorDevice.upload", "source.record_stream(self._compute)"),
    instead(ACCELERATOR, "AcceleratorDevice.iteration", "self._iterations.popleft().synchronize()",
            "self._iterations.popleft()"),
    without(ACCELERATOR, "AcceleratorDevice.iteration", "self._iterations.append(end)"),
    without(ACCELERATOR, "AcceleratorDevice.iteration", "self._compute.wait_stream(caller)"),
    instead(ACCELERATOR, "AcceleratorDevice.iteration", "self._compute.wait_stream(caller)",
            "caller.wait_stream(self._compute)"),
    instead(ACCELERATOR, "AcceleratorDevice.iteration",
            "self._zero = torch.Event(self.torch_device, enable_timing=True)",
            "self._zero = torch.Event(self.torch_device)"),
    without(ACCELERATOR, "AcceleratorDevice.iteration", "self._zero.record(self._compute)"),
    instead(ACCELERATOR, "AcceleratorDevice.iteration",
            "end = torch.Event(self.torch_device, blocking=True)",
            "end = caller.record_event()\ncaller = self._compute"),
    without(ACCELERATOR, "AcceleratorDevice.iteration", "end.record(self._compute)"),
    instead(ACCELERATOR, "AcceleratorDevice.iteration", "end.record(self._compute)", "end.record(caller)"),
    without(ACCELERATOR, "AcceleratorDevice.iteration", "caller.wait_event(end)"),
    Mutant(ACCELERATOR, "AcceleratorDevice.iteration", {"end.record(self._compute)": "caller.wait_event(end)",
           "caller.wait_event(end)": "end.record(self._compute)"}),
    # ---- copies
    without(ACCELERATOR, "AcceleratorDevice._copy", "self._compute.synchronize()"),
    instead(ACCELERATOR, "AcceleratorDevice._copy",
            "give = partial(self._give, transfer, source, target, self._compute.record_event(), chunks, look)",
            "give = partial(self._give, transfer, source, target, self._lanes[1].record_event(), chunks, look)"),
    without(ACCELERATOR, "AcceleratorDevice._copy", "self._hold(transfer)"),
    without(ACCELERATOR, "AcceleratorDevice._give", "lane.wait_event(ready)"),
    Mutant(ACCELERATOR, "AcceleratorDevice._give", {"lane.wait_event(ready)": "pass",
           "if chunks is None:": "if chunks is None:\n    lane.wait_event(ready)"}),
    without(ACCELERATOR, "AcceleratorDevice._give", "transfer.begun.record(lane)"),
    instead(ACCELERATOR, "AcceleratorDevice._give", "transfer.begun.record(lane)",
            "transfer.begun.record(self._compute)"),
    without(ACCELERATOR, "AcceleratorDevice._give", "transfer.ended.record(lane)"),
    Mutant(ACCELERATOR, "AcceleratorDevice._give", {"transfer.ended.record(lane)": "pass",
           "lane.wait_event(ready)": "lane.wait_event(ready)\ntransfer.ended.record(lane)"}),
    instead(ACCELERATOR, "AcceleratorDevice._give", "transfer.ended.record(lane)",
            "transfer.ended.record(self._compute)"),
    instead(ACCELERATOR, "AcceleratorDevice._give", "transfer.ended.record(lane)",
            "transfer.ended.record(self._work.streams.coding[transfer.direction])"),
    instead(ACCELERATOR, "AcceleratorDevice._hold",
            "while held and (held[0].source is None or held[0].has_ended()):", "while False:"),
    instead(ACCELERATOR, "AcceleratorDevice._hold",
            "while held and (held[0].source is None or held[0].has_ended()):", "while held:"),
    without(ACCELERATOR, "AcceleratorDevice._hold", "held.append(transfer)"),
    without(ACCELERATOR, "AcceleratorDevice._drop_staging", "coded.close()"),
    without(ACCELERATOR, "AcceleratorDevice._drop_staging", "lane.synchronize()"),
    instead(ACCELERATOR, "AcceleratorDevice.wait", "error = transfer.asked.join()", "error = None"),
    instead(ACCELERATOR, "AcceleratorDevice.wait",
            "transfer.waited = torch.Event(self.torch_device, enable_timing=True)",
            "transfer.waited = torch.Event(self.torch_device)"),
    without(ACCELERATOR, "AcceleratorDevice.wait", "transfer.waited.record(self._compute)"),
    instead(ACCELERATOR, "AcceleratorDevice.wait", "transfer.waited.record(self._compute)",
            "self._compute.wait_event(transfer.ended)\ntransfer.waited.record(self._compute)"),
    without(ACCELERATOR, "AcceleratorDevice.wait", "self._compute.wait_event(transfer.ended)"),
    instead(ACCELERATOR, "AcceleratorDevice.wait", "self._compute.wait_event(transfer.ended)",
            "self._compute.wait_event(transfer.begun or transfer.ended)"),
    without(ACCELERATOR, "AcceleratorDevice.wait", "transfer.source = transfer.target = None"),
    # ---- the end of everything
    instead(ACCELERATOR, "AcceleratorDevice.synchronize", "error = None if coded is None else coded.idle()",
            "error = None"),
    without(ACCELERATOR, "AcceleratorDevice.synchronize", "self._streams.synchronize()"),
    Mutant(ACCELERATOR, "AcceleratorDevice.synchronize", {
           "error = None if coded is None else coded.idle()": "self._streams.synchronize()",
           "self._streams.synchronize()": "error = None if coded is None else coded.idle()"}),
    without(ACCELERATOR, "AcceleratorDevice.synchronize", "self._iterations.clear()",
            survives="what has been waited for is waited for again, at once"),
    without(BACKENDS, "Streams.synchronize", "stream.synchronize()"),
    instead(BACKENDS, "Streams.all", "return (self.compute, *self.lanes, *self.coding)",
            "return (*self.lanes, *self.coding)"),
    instead(BACKENDS, "Streams.all", "return (self.compute, *self.lanes, *self.coding)",
            "return (self.compute, *self.coding)"),
    instead(BACKENDS, "Streams.all", "return (self.compute, *self.lanes, *self.coding)",
            "return (self.compute, *self.lanes)"),
    # ---- submissions by the thread
    without(LINK, "Asked.__init__", "self._lock.acquire()"),
    without(LINK, "Asked.end", "self._lock.release()"),
    without(LINK, "Asked.join", "self._lock.acquire()", "self._lock.release()"),
    without(LINK, "Asked.join", "self._lock.release()",
            survives="nothing joins a submission again once it has ended"),
    without(LINK, "CodedLink.ask", "self._asked.append(asked)"),
    without(LINK, "CodedLink.ask", "self._queue.put((copy, asked))"),
    without(LINK, "CodedLink._run", "del item"),
    without(LINK, "CodedLink.__init__", "self._thread.start()"),
    without(LINK, "_submit", "asked.end(error)"),
    instead(LINK, "CodedLink.idle", "error = self._asked[0].join()", "error = None"),
    without(LINK, "CodedLink.close", "self._queue.put(None)"),
    without(LINK, "CodedLink.close", "self._thread.join()"),
    without(LINK, "CodedLink.close", "stream.synchronize()"),
    # ---- compressed copies
    without(LINK, "CodedLink.__init__", "stream.wait_event(created)",
            survives="each use of the staging waits for the compute stream, at a later place"),
    without(LINK, "CodedLink.encode", "coding.wait_event(ready)"),
    without(LINK, "CodedLink.encode", "coding.wait_event(buffer.free)"),
    without(LINK, "CodedLink.encode", "lane.wait_event(coding.record_event())"),
    instead(LINK, "CodedLink.encode", "buffer.free = lane.record_event()", "buffer.free = coding.record_event()"),
    without(LINK, "CodedLink.encode", "buffer.free = lane.record_event()"),
    without(LINK, "CodedLink.decode", "lane.wait_event(buffer.free)"),
    without(LINK, "CodedLink.decode", "coding.wait_event(lane.record_event())"),
    without(LINK, "CodedLink.decode", "buffer.free = coding.record_event()"),
    instead(LINK, "CodedLink.decode", "buffer.free = coding.record_event()", "buffer.free = lane.record_event()"),
    without(LINK, "CodedLink.decode", "lane.wait_event(coding.record_event())"),
    # ---- host memory
    without(MEMORY, "registered_memory",
            "weakref.finalize(owner, _release, pages, address, backend, streams).atexit = False"),
    without(MEMORY, "_release", "lane.synchronize()"),
    instead(MEMORY, "_release", "for lane in streams.lanes:", "for lane in streams.lanes[:1]:"),
    instead(MEMORY, "_release", "for lane in streams.lanes:", "for lane in streams.lanes[1:]:"),
    without(MEMORY, "_release", "_kept.append(pages)"),
    # ---- the executor's waits
    without(SWAPPER, "Swapper.wait_out", "self._device.wait(transfer)"),
    without(SWAPPER, "Swapper.wait_in", "self._device.wait(transfer)"),
    without(SWAPPER, "Swapper.settle", "self._device.wait(transfer)",
            survives="the recovery has waited for the device before; without both waits it is reported"),
    without(EXECUTOR, "Executor._finish", "self._device.synchronize()"),
    without(EXECUTOR, "Executor.moved_bytes", "quiesce(self._device)",
            survives="the bytes of a copy are known where it is waited for, which an iteration does for each"),
    without(EXECUTOR, "Executor.statistics", "quiesce(self._device)"),
    without(EXECUTOR, "Executor.state_dict", "quiesce(self._device)"),
    without(EXECUTOR, "Executor.load_state_dict", "quiesce(self._device)"),
    without(EXECUTOR, "Executor.close", "quiesce(self._device)"),
    without("runtime/recovery.py", "Recovery.complete", "quiesce(self._device)",
            survives="the compute stream waits for each copy when the swapper settles; without both it is reported"),
    without("runtime/recovery.py", "Recovery.complete", "quiesce(self._device)")._replace(
            also=without(SWAPPER, "Swapper.settle", "self._device.wait(transfer)")),
    without("runtime/device.py", "quiesce", "device.synchronize()"),
    # ---- device graphs
    without(SWAPPER, "Swapper.refill",
            "self._device.wait(self._device.copy_in(source, bytes_of(self.storage(tensor))))"),
    instead(SWAPPER, "Swapper.refill",
            "self._device.wait(self._device.copy_in(source, bytes_of(self.storage(tensor))))",
            "self._device.copy_in(source, bytes_of(self.storage(tensor)))"),
    without(REPLAY, "Replays.drop", "quiesce(self._device)",
            survives="giving cached memory back waits for the device, too, where there is any"),
    without(REPLAY, "Replays.drop", "self._send_away(inside)"),
    without(REPLAY, "Replays._replay", "captured.relocation.run()"),
    without(REPLAY, "Replays._replay", "functions.fill(target, values[index])"),
    instead(REPLAY, "Replays._replay", "values[functions.returned :] = [output.clone() for output in captured.outputs]",
            "values[functions.returned :] = captured.outputs"),
    instead(REPLAY, "Replays.run", "if observed or self._captured is None or self._captured.key != key:",
            "if observed or self._captured is None:"),
    # ---- meters
    instead(MEASURE, "EventClock.start",
            "pair = (torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True))",
            "pair = (torch.Event(device), torch.Event(device))"),
    without(MEASURE, "EventClock.start", "pair[0].record(self._stream)"),
    without(MEASURE, "EventClock.stop", "self._pairs[-1][1].record(self._stream)"),
    instead(MEASURE, "EventClock.ready", "return not self._pairs or self._pairs[-1][1].query()", "return True"),
    without(MEASURE, "EventClock.read", "self._pairs[-1][1].synchronize()"),
]  # fmt: skip

ENDLESS = "without it the loop does not end"
LENT = "of a model's tensor, which is no lock"
GPU = "the coder of a GPU, which the emulated device does not run"
CODER = "codecs/cuda.py"
EXCEPTIONS = {
    Place(ACCELERATOR, "AcceleratorDevice._hold", "held.popleft()"): ENDLESS,
    Place(LINK, "CodedLink.ask", "self._asked.popleft()"): ENDLESS,
    Place(LINK, "CodedLink.idle", "self._asked.popleft()"): ENDLESS,
    Place(LINK, "CodedLink._run", "while (item := self._queue.get()) is not None:"): "the thread's work itself",
    Place(LINK, "CodedLink.__init__", "created = torch.accelerator.current_stream(device).record_event()"):
        "the waits for it have a mutant",
    Place(MEASURE, "allocator_peak", "torch.accelerator.synchronize(device)"): "tests and benchmarks measure with it",
    Place("runtime/state.py", "State._lent", "bound.release()"): LENT,
    Place("runtime/state.py", "State.lend", "bound.release()"): LENT,
    Place("runtime/state.py", "State.take_back", "bound.release()"): LENT,
    Place("runtime/state.py", "State.give_back", "bound.release()"): LENT,
    Place("runtime/state.py", "State.load", "swapper.join(key, values, slots, make_views)"): "of a graph's values",
    Place(CODER, "CudaCoder.clock", "torch.get_device_module(self._device).synchronize(self._device)"): GPU,
    Place(CODER, "CudaCoder._encode_lz4", "torch.cuda.current_stream(self._device).synchronize()"): GPU,
    Place(CODER, "CudaCoder._decode_lz4", "torch.cuda.current_stream(self._device).synchronize()"): GPU,
}  # fmt: skip

# All that orders work on an accelerator. The host's device (host.py) has tests of its own, with threads alone.
FILES = sorted(
    path
    for path in (*EXECUTION.glob("runtime/*.py"), *EXECUTION.glob("backends/*.py"), EXECUTION / CODER)
    if path.name != "host.py"
)
