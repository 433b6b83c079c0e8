# The types of the compiled form: the attributes of its classes, and what is called in C. What is not here stays Python.
#
# An attribute of a class in C is None or 0 until it is set: `__slots__` does not count, and no attribute is missing.

cimport cython

cdef extern from "_calls.h":
    bint COMPILED "1"
    object copy_context "PyContext_CopyCurrent"()
    object next_id "aiocuda_next_id"()
    object new_object "aiocuda_new_object"(object)
    int call_one "aiocuda_call_one"(unsigned long long, unsigned long long)
    int call_two "aiocuda_call_two"(unsigned long long, unsigned long long, unsigned long long)
    int call_three "aiocuda_call_three"(unsigned long long, unsigned long long, unsigned long long, unsigned long long)
    int call_four "aiocuda_call_four"(unsigned long long, unsigned long long)
    long long read_word "aiocuda_read_word"(unsigned long long)
    void add_to_word "aiocuda_add_to_word"(unsigned long long, long)
    bint write_value "aiocuda_write_value"(int, unsigned long long, object)

# Constants that the modules import.
cdef int BARRED, CLOSED, COMPLICATED, DONE, ENDED, SUBMITTED, FAULTED, INACTIVE, POISONED, RECORDED, REFUSING, SHARED, UNASKED
cdef Py_ssize_t MOST_PER_TURN
cdef double CALLBACK_SECONDS, IN_CALL

# -- events and estimates

cdef class Lease:
    cdef public object handle
    cdef public unsigned long long word
    cdef public long long generation
    cdef public list home
    cdef public bint timing, lent

cdef class Countdown:
    cdef public object future
    cdef public Py_ssize_t left
    cdef public bint fail_fast

cdef class Estimate:
    cdef public object kernel, seconds
    cdef public int agreed
    cdef Estimate _after_wait
    @cython.locals(known=cython.double, nearest=cython.double, off=cython.double, width=cython.double, is_exact=cython.bint,
                   agrees=cython.bint)
    cpdef add(self, double least, double most, int count=*, double foreseen=*)
    cpdef shorten(self, double factor)

cdef class _Instant(Estimate):
    pass

# -- the state of others that the core uses

cdef class Turn:
    cdef object _loop, _now, _task
    cdef double _since, _task_since
    cdef int _awaits
    cdef public Py_ssize_t immediate, inlined
    @cython.locals(now=cython.double)
    cpdef bint is_over(self) except -1
    @cython.locals(now=cython.double)
    cpdef bint is_over_for_task(self) except -1
    cpdef has_inlined(self, Py_ssize_t resolved)

cdef class Watch:
    cdef public object armed
    cdef public bint attended, parked, polling, repeats
    cdef public double looked, poll_from, poll_until, predicted, since
    cdef public long long target

cdef class DeviceHot:
    cdef public object listeners
    cdef public bint guarded
    cdef public Py_ssize_t limit
    cdef public double linger
    cdef public dict starts
    cdef public list idle_leases

cdef class ReactorHot:
    cdef public dict attended
    cdef public bint faulted
    cdef public object on_progress
    cdef public Py_ssize_t polls, resolved
    cdef public Turn turn
    @cython.locals(queue=Ring, watch=Watch, following=cython.double, found=list)
    cpdef tuple due(self, double reached, double quiet_from, double longest, double step)

cdef class BlockFields:
    cdef object __weakref__
    cdef public object driver, address, nbytes, home, owner, shape, dtype, peers, dependencies, allocation_event, poison
    cdef public object region
    cdef public dict uses
    cdef public int device
    cdef public long long assigned
    cdef public bint freed, ready
    cpdef list unfinished(self)

cdef class Native:
    cdef unsigned long long _work, _block, _record, _query, _wait, _stream, _closed, _stream_closed, _calls
    cdef int _not_ready
    cdef object _name, _pack, _event, _refuse, _owner
    cdef list _letters, _places
    @cython.locals(event=cython.ulonglong, at=cython.Py_ssize_t, code=cython.int)
    cpdef bint enqueue(self, object values, Lease lease) except -1
    @cython.locals(code=cython.int)
    cpdef int query(self, Lease lease) except -2
    @cython.locals(event=cython.ulonglong, code=cython.int)
    cpdef bint wait(self, Lease lease) except -1

# -- operations

cdef class Operation:
    cdef public object id, kind

cdef class StreamOperation(Operation):
    cdef object __weakref__
    cdef public Ring queue
    cdef public object context, value, keep, waiters, extra, own_label, call, arguments, gate
    cdef public int status
    cdef public Estimate estimate
    cdef public Lease lease
    cdef public double submitted_at
    cpdef forget_call(self)
    cpdef return_lease(self, Lease lease)
    cpdef bint add_waiter(self, object waiter) except -1
    cpdef wake_waiters(self)
    @cython.locals(countdown=Countdown)
    cdef _wake(self, object waiter)

# -- the ring

@cython.final
cdef class Outlook:
    cdef public StreamOperation awaited
    cpdef forget(self)
    cpdef note_waiter(self, StreamOperation operation)
    @cython.locals(operation=StreamOperation, estimate=Estimate, refill=cython.Py_ssize_t, index=cython.Py_ssize_t,
                   repeats=cython.bint, copies_out=cython.bint)
    cpdef find(self, Ring queue)
    @cython.locals(longest=cython.double, estimate=Estimate)
    cpdef double patience(self, Ring queue, StreamOperation operation, double now) except -1
    @cython.locals(start=cython.double, estimate=Estimate)
    cpdef shorten(self, Ring queue, StreamOperation first, StreamOperation last, double now)

@cython.final
cdef class Ring:
    cdef object __weakref__
    cdef public ReactorHot reactor_hot
    cdef public DeviceHot device_hot
    cdef public Watch watch
    cdef public Outlook outlook
    cdef public object reactor, device_state, loop, driver, handle, now, pending, on_host, latencies, name, rare
    cdef public object _poison, _record
    cdef public Native _native
    cdef public int obstacles
    cdef public long long enqueued, newest_id, unmarked_wait_at, live_bytes, peak_bytes
    cdef public bint after_wait
    cdef public double _asked_at, last_busy, last_resolved
    cdef public StreamOperation awaiting
    cdef public bint _resolving
    cpdef append(self, StreamOperation operation)
    cpdef check_loop(self)
    cpdef check(self)
    cpdef bint ends_with(self, object operation) except -1
    @cython.locals(lease=Lease)
    cpdef follow(self, StreamOperation operation)
    cpdef last_work(self)
    cpdef attend(self, StreamOperation operation=*)
    @cython.locals(now=cython.double, lease=Lease, idle=list)
    cpdef submit(self, StreamOperation operation, object call, object arguments, bint ahead=*)
    cpdef enqueue_unusual(self, object kind, Estimate estimate, object keep, object call, object values, object label)
    cpdef StreamOperation marker(self)
    @cython.locals(marker=StreamOperation)
    cpdef StreamOperation submit_marker(self)
    cpdef end(self)
    cpdef Py_ssize_t poll(self, Py_ssize_t budget=*, bint awaited=*, bint newest_only=*) except -1
    @cython.locals(known=cython.Py_ssize_t, resolved=cython.Py_ssize_t, operation=StreamOperation, newest=StreamOperation,
                   proven=StreamOperation, target=StreamOperation, lease=Lease)
    cdef Py_ssize_t _poll(self, Py_ssize_t budget, bint awaited, bint newest_only) except -1
    @cython.locals(turn=Turn, resolved=cython.Py_ssize_t)
    cpdef look_ahead(self, StreamOperation operation)
    cpdef glance(self)
    @cython.locals(hot=DeviceHot, lease=Lease, now=cython.double, estimate=Estimate)
    cpdef resolve_to(self, StreamOperation operation)
    @cython.locals(turn=Turn, known=cython.Py_ssize_t, most=cython.Py_ssize_t, resolved=cython.Py_ssize_t)
    cdef _resolve_up_to(self, StreamOperation operation)
    @cython.locals(count=cython.Py_ssize_t)
    cdef Py_ssize_t _count_to(self, object operation) except -1
    @cython.locals(lease=Lease, hot=DeviceHot, guarded=cython.bint, now=cython.double, until=cython.double,
                   longest=cython.double, estimate=Estimate)
    cpdef linger(self, StreamOperation operation, object gathered=*)
    @cython.locals(listened=cython.bint, is_special=cython.bint, first=StreamOperation, head=StreamOperation, sampled=Estimate, estimate=Estimate,
                   resolved=cython.Py_ssize_t, done=cython.Py_ssize_t, timed=cython.Py_ssize_t, now=cython.double,
                   lease=Lease, countdown=Countdown)
    cdef Py_ssize_t _resolve(self, Py_ssize_t known, Py_ssize_t most) except -1
    @cython.locals(lease=Lease)
    cdef bint _has_passed(self, StreamOperation operation) except -1
    @cython.locals(operation=StreamOperation)
    cdef StreamOperation _newest_recorded(self)
    @cython.locals(answer=cython.int)
    cdef bint _is_done(self, Lease lease) except -1
    @cython.locals(busy=cython.double, start=cython.double, watch=Watch, foreseen=cython.double)
    cdef _after_resolving(self, Estimate sampled, StreamOperation first, StreamOperation last, Py_ssize_t timed, double now)

@cython.locals(operation=StreamOperation)
cpdef new_operation(Ring queue, object kind, Estimate estimate, object keep, object cls=*)

cdef class BoundCall:
    cdef public Ring queue
    cdef public object kind
    cdef public Estimate estimate
    cdef Estimate _after_wait
    cdef object _call, _unrecorded
    cdef Native _native
    @cython.locals(queue=Ring, hot=DeviceHot, operation=StreamOperation, lease=Lease, at=cython.double,
                   idle=list, number=cython.longlong)
    cpdef enqueue(self, object values, object keep, object label=*)

cdef class BoundLaunch(BoundCall):
    cdef public object launcher, kernel
    cdef public tuple pointers, converters
    @cython.locals(queue=Ring, index=cython.Py_ssize_t, used=StreamOperation, operation=StreamOperation)
    cpdef repeat(self, tuple args, object label=*, object values=*)

cdef class BoundCopy(BoundCall):
    cdef object _address, _device, _dtype, _host, _host_writes, _nbytes, _shape
    cdef bint _uploads
    @cython.locals(queue=Ring, used=StreamOperation)
    cpdef repeat(self, object device, object host)

cdef class NewestLaunch:
    cdef public BoundLaunch bound
    cdef public object kernel, grid, block, shared_bytes
    cdef public long long launches

cdef class EnqueuingStream:
    cdef public object _hook, _launches, _transfers
    cdef public NewestLaunch _newest

cdef class Chain:
    cdef tuple _functions, _names, _queues, _streams
    cdef public Py_ssize_t position
    @cython.locals(names=tuple, queues=tuple, queue=Ring, end=StreamOperation, position=cython.Py_ssize_t)
    cpdef Py_ssize_t enqueue(self, Py_ssize_t start, object slot, list ends, dict returned) except -1

cdef class BoundJoin:
    cdef Ring _first
    cdef tuple _others
    cdef BoundCall _waiting, _recorded
    cdef object _wait, _unusual, _follow
    @cython.locals(first=Ring, others=tuple, hot=DeviceHot, queue=Ring, tail=StreamOperation, lease=Lease,
                   leases=list, joined=StreamOperation, event=Lease)
    cpdef join(self)
    @cython.locals(native=Native, lease=Lease)
    cdef bint _waits_in_c(self, list leases) except -1
    @cython.locals(queue=Ring)
    cdef bint _others_wait_in_c(self, Lease event) except -1

@cython.final
cdef class LiveBlocks:
    cdef readonly dict records
    cdef readonly long long nbytes, peak_bytes
    cdef object _block_class, _device, _driver, _free_lists, _owner
    cdef long long _largest, _most_kept
    cdef dict _kept, _lists, _sizes
    @cython.locals(of_stream=dict, addresses=list, block=BlockFields)
    cpdef take(self, Ring queue, object nbytes, object shape, object dtype)
    @cython.locals(queue=Ring, of_stream=dict, addresses=list, record=tuple, size=cython.longlong)
    cpdef bint give(self, BlockFields block) except -1
    cpdef count(self, object address, long long nbytes, Ring home, object resource)
    @cython.locals(record=tuple, home=Ring)
    cpdef discard(self, object address)

cdef class Gathering:
    cdef list _operations
    cdef bint _return_exceptions
    cdef object _callbacks
    cdef Countdown _countdown
    @cython.locals(operation=StreamOperation, last=StreamOperation, queue=Ring, waiting=list, left=list, asks=cython.bint)
    cdef list _query_unfinished(self, dict queues)
    @cython.locals(operation=StreamOperation)
    cdef _wait_by(self, Countdown countdown, list waiting)
    @cython.locals(operation=StreamOperation)
    cdef _leave(self, Countdown countdown, list waiting)
    @cython.locals(operation=StreamOperation, queue=Ring, turn=Turn)
    cdef bint _has_to_yield(self, dict queues) except -1
    @cython.locals(operation=StreamOperation, outcomes=list)
    cdef list _outcomes(self)
    cdef StreamOperation _first_failed(self)
