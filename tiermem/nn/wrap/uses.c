/* A use of a block, compiled: Group.hold_locked and Group.let_go_locked in passes that repeat
 * others, with Replay.use, Replay._swap, Pointing.point and away, StreamCopyEngine.up and
 * DriverCalls.copy_behind in line.
 *
 * The Python code says what is done and why, and alone handles what is out of the ordinary: each
 * function here looks first whether everything is as it is in most uses, and declines otherwise,
 * with nothing changed. Both work on the same objects and can take turns from use to use.
 *
 * The caller has the GIL and the manager's lock. Between the changes of a swap no Python code
 * runs, so no signal handler cuts them short.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "these uses rely on the GIL"
#endif
#include <structmember.h>
#include <stdint.h>
#include <time.h>

/* -- attributes of classes with __slots__, by their offsets ----------------------------------- */

#define CLASSES(X)                                                                                 \
    X(Run) X(Swapped) X(Record) X(Slot) X(Swap) X(Step) X(Extent) X(Block) X(Pointing) X(Writes)   \
    X(Event) X(Departures) X(Inside)

#define MEMBERS(X)                                                                                 \
    X(Run, steps) X(Run, number) X(Run, departures) X(Run, cursor)                                 \
    X(Swapped, at) X(Swapped, by_address) X(Swapped, count) X(Swapped, current)                    \
    X(Swapped, enter) X(Swapped, home_ready) X(Swapped, kept) X(Swapped, ready)                    \
    X(Swapped, slots) X(Swapped, sources) X(Swapped, table) X(Swapped, transfers)                  \
    X(Record, block) X(Record, home) X(Record, home_extent) X(Record, at_home)                     \
    X(Record, defined) X(Record, in_hbm) X(Record, extent) X(Record, leases) X(Record, fixed)      \
    X(Slot, extent) X(Slot, bytes) X(Slot, views) X(Slot, storage) X(Slot, reading)                \
    X(Slot, address) X(Slot, baseline) X(Slot, sight) X(Slot, pointed) X(Slot, idle)               \
    X(Slot, pointer)                                                                               \
    X(Swap, comes) X(Swap, leaves) X(Swap, nbytes) X(Swap, passes) X(Swap, key) X(Swap, fit)       \
    X(Swap, came) X(Swap, went)                                                                    \
    X(Step, used) X(Step, block) X(Step, swaps)                                                    \
    X(Extent, offset) X(Extent, nbytes)                                                            \
    X(Block, id) X(Block, name) X(Block, nbytes)                                                   \
    X(Pointing, _apart) X(Pointing, _indices) X(Pointing, hidden) X(Pointing, plain)               \
    X(Pointing, shown) X(Pointing, slot) X(Pointing, tensors)                                      \
    X(Writes, always) X(Writes, counted) X(Writes, merging) X(Writes, suspect)                     \
    X(Writes, versions)                                                                            \
    X(Event, _over) X(Event, handle) X(Event, waiter)                                              \
    X(Departures, count)                                                                           \
    X(Inside, thread) X(Inside, depth)

#define THINGS(X) /* other objects, by name */                                                     \
    X(ABSENT) X(FILLING) X(VALID) X(DIRTY) X(DRAM) X(use_count) X(Plain) X(inference_mode)         \
    X(is_grad_enabled) X(REFUSALS)

#define DECLARE_CLASS(class) static PyTypeObject *class##_class;
CLASSES(DECLARE_CLASS)
#define DECLARE_MEMBER(class, member) static Py_ssize_t class##_##member;
MEMBERS(DECLARE_MEMBER)
#define DECLARE_THING(name) static PyObject *the_##name;
THINGS(DECLARE_THING)

#define NAMES(X) /* of attributes that are looked up */                                            \
    X(run) X(cursor) X(exact) X(last) X(owed) X(largest_later) X(sampling) X(_stream) X(count)     \
    X(capturing) X(stream) X(use) X(hold_up) X(_swap) X(go_on) X(_stop) X(release) X(outcomes)     \
    X(judge) X(poisons) X(left_unused) X(hbm) X(retake) X(leave) X(unfill) X(up)         \
    X(away) X(point) X(data) X(__class__) X(_version) X(read) X(reading_baseline) X(data_ptr)      \
    X(numel) X(fences) X(bound) X(holds) X(soft) X(__enter__) X(__exit__) X(_check) X(waste)       \
    X(wasted) X(dirty) X(inside) X(unsure) X(torn) X(acquire) X(_watch) X(inner) X(explain)
#define DECLARE_NAME(name) static PyObject *s_##name;
NAMES(DECLARE_NAME)

#define GET(class, member, object) (*(PyObject **)((char *)(object) + class##_##member))
#define IS(class, object) (Py_TYPE(object) == class##_class)

static inline void put(PyObject **at, PyObject *value)
{
    PyObject *before = *at;
    Py_INCREF(value);
    *at = value;
    Py_XDECREF(before);
}
#define PUT(class, member, object, value) put(&GET(class, member, object), value)

static inline void put_number(PyObject **at, PyObject *number) /* takes the reference */
{
    PyObject *before = *at;
    *at = number;
    Py_XDECREF(before);
}

/* Whether two ints are equal; both fit 64 bits. */
static inline int same(PyObject *a, PyObject *b)
{
    return a == b || PyLong_AsLongLong(a) == PyLong_AsLongLong(b);
}

static inline int truth(PyObject *object) /* of a bool, an int or a container; < 0 on error */
{
    return object == Py_True ? 1 : object == Py_False || object == Py_None ? 0
                                                                           : PyObject_IsTrue(object);
}

static int truth_of(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (!found)
        return -1;
    int yes = truth(found);
    Py_DECREF(found);
    return yes;
}

/* -- the driver's functions ------------------------------------------------------------------- */

typedef int (*record_t)(void *event, void *stream);
typedef int (*wait_t)(void *stream, void *event, unsigned flags);
typedef int (*copy_t)(uint64_t target, uint64_t source, size_t nbytes, void *stream);

/* -- what all uses of one manager share ------------------------------------------------------- */

#define PARTS(X)                                                                                   \
    X(replay) X(planner) X(evictor) X(departures) X(deferred) X(copy) X(pass_timer) X(pending)     \
    X(swapped) X(calls) X(compute) X(rising) X(landed) X(falling) X(marks) X(local)                \
    X(capturing) X(stream) X(current_device)

#define DECLARE_PART(name) PyObject *name;
typedef struct {
    PyObject_HEAD
    PARTS(DECLARE_PART)
    void *up;       /* stream of copies up; NULL where copies do not go through the driver */
    PyObject *up_number;
    long device;
    record_t record;
    wait_t wait;
    copy_t submit;
} Shared;

/* -- what one block's uses need --------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Shared *shared;
    PyObject *group; /* a weak reference: the group has this */
    PyObject *block_id, *record, *pointing, *writes;
    PyObject *hold, *let_go; /* functions of Group, in Python */
} Use;

/* -- pointing --------------------------------------------------------------------------------- */

static int set_classes(PyObject *pairs)
{
    if (!PyList_CheckExact(pairs) && !PyTuple_CheckExact(pairs)) {
        PyErr_SetString(PyExc_TypeError, "classes are neither a list nor a tuple");
        return -1;
    }
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(pairs); index++) {
        PyObject *pair = PySequence_Fast_GET_ITEM(pairs, index);
        PyObject *thing = PyTuple_GET_ITEM(pair, 0), *kind = PyTuple_GET_ITEM(pair, 1);
        if ((PyObject *)Py_TYPE(thing) == kind)
            continue;
        Py_INCREF(pair);
        int failed = PyObject_SetAttr(thing, s___class__, kind);
        Py_DECREF(pair);
        if (failed)
            return -1;
    }
    return 0;
}

static int in_inference_mode(void)
{
    PyObject *found = PyObject_CallNoArgs(the_inference_mode);
    if (!found)
        return -1;
    int yes = truth(found);
    Py_DECREF(found);
    return yes;
}

/* Pointing.point of tensors of torch's own classes; declines (0) or points (1). */
static int point_plainly(PyObject *pointing, PyObject *slot)
{
    PyObject *tensors = GET(Pointing, tensors, pointing), *views = GET(Slot, views, slot);
    PyObject *indices = GET(Pointing, _indices, pointing), *before;
    Py_ssize_t count, index;
    int inference;
    if (GET(Pointing, plain, pointing) != Py_True || !PyList_CheckExact(tensors) ||
        !PyList_CheckExact(views) || (indices != Py_None && !PyList_CheckExact(indices)))
        return 0;
    count = PyList_GET_SIZE(tensors);
    if ((indices == Py_None ? PyList_GET_SIZE(views) : PyList_GET_SIZE(indices)) != count)
        return 0;
    if ((inference = in_inference_mode()))
        return inference < 0 ? -1 : 0;
    for (index = 0; index < count; index++) {
        Py_ssize_t at = index;
        if (indices != Py_None)
            at = PyLong_AsSsize_t(PyList_GET_ITEM(indices, index));
        if (at < 0 || at >= PyList_GET_SIZE(views)) {
            PyErr_SetString(PyExc_IndexError, "a tensor has no view in its slot");
            return -1;
        }
        if (PyObject_SetAttr(PyList_GET_ITEM(tensors, index), s_data, PyList_GET_ITEM(views, at)))
            return -1;
    }
    before = GET(Pointing, slot, pointing);
    PyObject *none = PyLong_FromLong(0), *all = PyLong_FromSsize_t(count);
    if (!none || !all) {
        Py_XDECREF(none);
        Py_XDECREF(all);
        return -1;
    }
    if (before != Py_None)
        PUT(Slot, pointed, before, none);
    Py_DECREF(none);
    put_number(&GET(Slot, pointed, slot), all);
    PUT(Slot, pointer, slot, pointing);
    PUT(Pointing, slot, pointing, slot);
    return 1;
}

/* Pointing.away; declines (0) in inference mode. */
static int point_away(PyObject *pointing)
{
    PyObject *apart = GET(Pointing, _apart, pointing), *plain, *slot, *done, *none;
    int inference, failed = 0;
    if (!PyList_CheckExact(apart))
        return 0;
    if ((inference = in_inference_mode()))
        return inference < 0 ? -1 : 0;
    if (!(plain = PyObject_CallNoArgs(the_Plain)))
        return -1;
    if (!(done = PyObject_CallMethodNoArgs(plain, s___enter__))) {
        Py_DECREF(plain);
        return -1;
    }
    Py_DECREF(done);
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(apart) && !failed; index++) {
        PyObject *pair = PyList_GET_ITEM(apart, index);
        Py_INCREF(pair);
        failed = PyObject_SetAttr(PyTuple_GET_ITEM(pair, 0), s_data, PyTuple_GET_ITEM(pair, 1));
        Py_DECREF(pair);
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    done = PyObject_CallMethodObjArgs(plain, s___exit__, Py_None, Py_None, Py_None, NULL);
    if (done || type)
        PyErr_Restore(type, value, trace);
    if (!done)
        failed = -1;
    Py_XDECREF(done);
    Py_DECREF(plain);
    if (failed)
        return -1;
    slot = GET(Pointing, slot, pointing);
    if (slot != Py_None) {
        if (!(none = PyLong_FromLong(0)))
            return -1;
        put_number(&GET(Slot, pointed, slot), none);
        PUT(Slot, idle, slot, Py_False);
        PUT(Pointing, slot, pointing, Py_None);
    }
    return 1;
}

/* -- copies ----------------------------------------------------------------------------------- */

/* Has DriverCalls raise what a function of the driver has returned. */
static int refuse(Shared *shared, const char *what, int code)
{
    PyObject *done = PyObject_CallMethod(shared->calls, "_check", "si", what, code);
    Py_XDECREF(done);
    if (done)
        PyErr_SetString(PyExc_RuntimeError, "the driver failed");
    return -1;
}

/* Whether calls with a stream's handle need no context first; < 0 on error. */
static int is_bound(Shared *shared)
{
    int bound = truth_of(shared->local, s_bound);
    PyObject *device;
    if (bound <= 0)
        return bound;
    if (!(device = PyObject_CallNoArgs(shared->current_device)))
        return -1;
    bound = PyLong_AsLong(device) == shared->device;
    Py_DECREF(device);
    return bound;
}

/* Makes a stream wait for an event; DriverCalls.wait. */
static int hold_up(Shared *shared, PyObject *number, PyObject *event)
{
    PyObject *done;
    int bound = 0;
    if (shared->up && IS(Event, event) && PyLong_AsLongLong(number)) {
        if ((bound = is_bound(shared)) < 0)
            return -1;
    }
    if (bound) {
        void *handle = PyLong_AsVoidPtr(GET(Event, handle, event));
        int code = shared->wait(PyLong_AsVoidPtr(number), handle, 0);
        if (code)
            return refuse(shared, "cuStreamWaitEvent", code);
        PUT(Event, waiter, event, number);
        return 0;
    }
    done = PyObject_CallMethodObjArgs(shared->copy, s_hold_up, number, event, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int address_of(PyObject *tensor, uint64_t *address)
{
    PyObject *found = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    if (!found)
        return -1;
    *address = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

/* The fence that begins where an extent does, if `again` is its event and no other copy is in
 * the way; else NULL, without an error: what StreamCopyEngine.up does then takes Python. */
static PyObject *fence_to_renew(Shared *shared, PyObject *extent, PyObject *again,
                                PyObject **fences)
{
    PyObject *of[3] = {shared->falling, shared->landed, shared->rising}, *found = NULL;
    for (int index = 0; index < 3; index++) {
        found = PyObject_GetAttr(of[index], s_fences);
        if (!found || !PyDict_CheckExact(found) || (index < 2 && PyDict_GET_SIZE(found))) {
            PyErr_Clear();
            Py_XDECREF(found);
            return NULL;
        }
        if (index < 2)
            Py_DECREF(found);
    }
    PyObject *fence = PyDict_GetItemWithError(found, GET(Extent, offset, extent));
    if (!fence || !PyTuple_CheckExact(fence) || PyTuple_GET_ITEM(fence, 1) != again) {
        PyErr_Clear();
        Py_DECREF(found);
        return NULL;
    }
    *fences = found;
    Py_INCREF(fence);
    return fence;
}

/* Submits a copy up with an event that is recorded anew, in line: DriverCalls.copy_behind.
 * Returns 1, 0 where it takes Python (with nothing submitted), -1 on error. */
static int copy_again(Shared *shared, PyObject *place, PyObject *source, PyObject *stream,
                      PyObject *after, PyObject *again)
{
    PyObject *extent = GET(Slot, extent, place), *fences = NULL, *fence, *other, *mark, *found;
    PyObject *bytes = GET(Slot, bytes, place);
    uint64_t to, from;
    size_t nbytes;
    Py_ssize_t at = 0;
    int code = 0, bound;
    if (!shared->up || !IS(Event, again) || (after != Py_None && !IS(Event, after)))
        return 0;
    if ((bound = is_bound(shared)) <= 0)
        return bound;
    if (PyDict_SetItem(shared->compute, stream, Py_None))
        return -1;
    while (PyDict_Next(shared->compute, &at, &other, &found)) {
        mark = PyDict_GetItemWithError(shared->marks, other);
        if (!mark)
            return PyErr_Occurred() ? -1 : 0;
    }
    if (!(fence = fence_to_renew(shared, extent, again, &fences)))
        return 0;
    if (PyDict_DelItem(fences, GET(Extent, offset, extent)) ||
        PyDict_SetItem(fences, GET(Extent, offset, extent), fence))
        goto failed;
    if (address_of(bytes, &to) || address_of(source, &from))
        goto failed;
    if (!(found = PyObject_CallMethodNoArgs(bytes, s_numel)))
        goto failed;
    nbytes = PyLong_AsSize_t(found);
    Py_DECREF(found);
    if (after != Py_None && !same(GET(Event, waiter, after), shared->up_number)) {
        code = shared->wait(shared->up, PyLong_AsVoidPtr(GET(Event, handle, after)), 0);
        if (!code)
            PUT(Event, waiter, after, shared->up_number);
    }
    at = 0;
    while (!code && PyDict_Next(shared->compute, &at, &other, &found)) {
        void *event = PyLong_AsVoidPtr(PyDict_GetItem(shared->marks, other));
        code = shared->record(event, PyLong_AsVoidPtr(other));
        if (!code)
            code = shared->wait(shared->up, event, 0);
    }
    if (code) {
        refuse(shared, "cuEventRecord or cuStreamWaitEvent", code);
        goto failed;
    }
    if ((code = shared->submit(to, from, nbytes, shared->up))) {
        char what[64];
        PyOS_snprintf(what, sizeof what, "cuMemcpyAsync of %zu bytes", nbytes);
        refuse(shared, what, code);
        goto failed;
    }
    PUT(Event, _over, again, Py_False);
    if (!(found = PyLong_FromLong(-1)))
        goto failed;
    put_number(&GET(Event, waiter, again), found);
    if ((code = shared->record(PyLong_AsVoidPtr(GET(Event, handle, again)), shared->up))) {
        refuse(shared, "cuEventRecord", code);
        goto failed;
    }
    Py_DECREF(fence);
    Py_DECREF(fences);
    return PyErr_Occurred() ? -1 : 1;
failed:
    Py_DECREF(fence);
    Py_DECREF(fences);
    return -1;
}

/* CopyEngine.up; returns the event or None. */
static PyObject *copy_up(Shared *shared, PyObject *place, PyObject *source, PyObject *stream,
                         PyObject *after, PyObject *again)
{
    int done = copy_again(shared, place, source, stream, after, again);
    if (done < 0)
        return NULL;
    if (done) {
        Py_INCREF(again);
        return again;
    }
    return PyObject_CallMethodObjArgs(shared->copy, s_up, GET(Slot, bytes, place), source,
                                      GET(Slot, extent, place), after, again, NULL);
}

/* -- swaps ------------------------------------------------------------------------------------ */

static long long references(PyObject *handle)
{
    PyObject *found = PyObject_CallOneArg(the_use_count, handle);
    if (!found)
        return -1;
    long long count = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return count;
}

/* Whether only tiermem and the tensors that it points see a slot; < 0 on error. */
static int is_unaliased(PyObject *slot)
{
    long long count = references(GET(Slot, storage, slot)), own;
    PyObject *sight = GET(Slot, sight, slot), *found;
    if (count < 0)
        return -1;
    own = PyLong_AsLongLong(GET(Slot, baseline, slot)) + PyLong_AsLongLong(GET(Slot, pointed, slot));
    if (count > own)
        return 0;
    if ((count = references(GET(Slot, reading, slot))) < 0)
        return -1;
    if (!(found = PyObject_GetAttr(sight, s_reading_baseline)))
        return -1;
    own = PyLong_AsLongLong(found);
    Py_DECREF(found);
    if (!(found = PyObject_GetAttr(sight, s_read)))
        return -1;
    own += PyObject_Size(found);
    Py_DECREF(found);
    return count <= own;
}

static long long now(void) /* time.perf_counter_ns */
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (long long)time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Enters the row of a copy that came up. */
static int enter_row(PyObject *swapped, PyObject *block, long long began)
{
    PyObject *row = Py_BuildValue("sOLLO", "dram->hbm", GET(Block, name, block), began, now(),
                                  GET(Block, nbytes, block));
    PyObject *done = row ? PyObject_CallOneArg(GET(Swapped, enter, swapped), row) : NULL;
    if (done) {
        Py_DECREF(done);
        done = PyObject_CallOneArg(GET(Swapped, count, swapped), row);
    }
    Py_XDECREF(row);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* What a swap that raises leaves to be put right; the error stays. */
static void undo_swap(PyObject *swapped, PyObject *leaves, PyObject *comes, PyObject *before,
                      PyObject *extent, PyObject *went, PyObject *came)
{
    PyObject *type, *value, *trace, *done = NULL, *hbm = NULL;
    PyErr_Fetch(&type, &value, &trace);
    if (GET(Record, extent, leaves) == Py_None && GET(Record, in_hbm, comes) == the_FILLING) {
        done = PyObject_CallMethodObjArgs(GET(Swapped, slots, swapped), s_leave, went, NULL);
        if (done) {
            Py_DECREF(done);
            done = PyObject_CallMethodObjArgs(GET(Swapped, transfers, swapped), s_unfill, came,
                                              NULL);
        }
        Py_XDECREF(done);
    } else if (GET(Record, extent, leaves) == before) {
        hbm = PyObject_GetAttr(GET(Swapped, table, swapped), s_hbm);
        done = hbm ? PyObject_CallMethodObjArgs(hbm, s_holds, before, NULL) : NULL;
        int there = done ? truth(done) : -1;
        Py_XDECREF(done);
        if (!there) {
            done = PyObject_CallMethodObjArgs(hbm, s_retake, extent, before, NULL);
            Py_XDECREF(done);
        }
        Py_XDECREF(hbm);
    }
    if (PyErr_Occurred()) /* as in Python, that of the handler is raised */
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
    else
        PyErr_Restore(type, value, trace);
}

enum { FAILED = -1, DECLINED, DONE, STOPPED };

/* The bookkeeping and the copy of a swap that has its place. */
static int exchange(Shared *shared, PyObject *run, PyObject *swap, PyObject *slot, PyObject *place,
                    PyObject *before, PyObject *extent, PyObject *source, PyObject *again,
                    PyObject *stream)
{
    PyObject *swapped = shared->swapped, *came = GET(Swap, came, swap);
    PyObject *leaves = GET(Swap, leaves, swap), *comes = GET(Swap, comes, swap);
    PyObject *went = GET(Swap, went, swap), *transfers = GET(Swapped, transfers, swapped);
    PyObject *ready = GET(Swapped, ready, swapped), *current = GET(Swapped, current, swapped);
    PyObject *number, *after, *event, *done, *fetch;
    long long began;
    int unused;
    number = PyLong_FromLongLong(PyLong_AsLongLong(GET(Run, departures, run)) + 1);
    if (!number)
        return FAILED;
    PUT(Record, in_hbm, leaves, the_ABSENT);
    PUT(Record, extent, leaves, Py_None);
    PUT(Record, in_hbm, comes, the_FILLING);
    PUT(Record, extent, comes, extent);
    if (PyDict_SetItem(GET(Swapped, at, swapped), GET(Extent, offset, before), comes)) {
        Py_DECREF(number);
        return FAILED;
    }
    PUT(Departures, count, shared->departures, number);
    put_number(&GET(Run, departures, run), number);
    if ((unused = truth_of(transfers, s_poisons)) == 0)
        unused = PyDict_Contains(shared->pending, went);
    if (unused < 0)
        return FAILED;
    if (unused) {
        done = PyObject_CallMethodObjArgs(transfers, s_left_unused, went, slot, before, NULL);
        if (!done)
            return FAILED;
        Py_DECREF(done);
    }
    if (PyDict_Contains(ready, went) == 1 && PyDict_DelItem(ready, went))
        return FAILED;
    if (PyDict_SetItem(GET(Swapped, by_address, swapped), GET(Slot, address, place), place) ||
        PyDict_SetItem(current, came, place) || PyDict_DelItem(current, went))
        return FAILED;
    began = now();
    after = PyDict_GetItemWithError(GET(Swapped, home_ready, swapped), came);
    if (!after && PyErr_Occurred())
        return FAILED;
    if (!after)
        after = Py_None;
    Py_INCREF(after);
    event = copy_up(shared, place, source, stream, after, again);
    Py_DECREF(after);
    if (!event)
        return FAILED;
    unused = event != Py_None && PyDict_SetItem(ready, came, event);
    Py_DECREF(event);
    if (unused || enter_row(swapped, GET(Record, block, comes), began))
        return FAILED;
    PUT(Record, in_hbm, comes, the_VALID);
    number = PyNumber_Add(GET(Run, number, run), GET(Swap, passes, swap));
    if (!number)
        return FAILED;
    fetch = PyTuple_Pack(2, number, GET(Swap, key, swap));
    Py_DECREF(number);
    if (!fetch)
        return FAILED;
    unused = PyDict_SetItem(shared->pending, came, fetch);
    Py_DECREF(fetch);
    return unused ? FAILED : DONE;
}

/* Makes the place of another size of what leaves that of what comes: Allocator.retake. */
static int retake(Shared *shared, PyObject *before, PyObject *extent)
{
    PyObject *hbm = PyObject_GetAttr(GET(Swapped, table, shared->swapped), s_hbm), *done;
    if (!hbm)
        return FAILED;
    done = PyObject_CallMethodObjArgs(hbm, s_retake, before, extent, NULL);
    Py_DECREF(hbm);
    if (!done)
        return FAILED;
    int yes = truth(done);
    Py_DECREF(done);
    if (yes < 0)
        return FAILED;
    if (yes)
        return DONE;
    done = PyObject_CallMethodNoArgs(shared->replay, s__stop);
    Py_XDECREF(done);
    return done ? STOPPED : FAILED;
}

/* Replay._swap. */
static int make_swap(Shared *shared, PyObject *run, PyObject *swap, PyObject *stream)
{
    PyObject *swapped = shared->swapped, *leaves, *comes, *before, *slot, *home, *source, *places;
    PyObject *place, *extent, *again, *went, *came, *pointer;
    int outcome, alone, resized;
    if (!IS(Swap, swap))
        return DECLINED;
    leaves = GET(Swap, leaves, swap), comes = GET(Swap, comes, swap);
    went = GET(Swap, went, swap), came = GET(Swap, came, swap);
    before = GET(Record, extent, leaves);
    slot = PyDict_GetItemWithError(GET(Swapped, current, swapped), went);
    if (!slot)
        return PyErr_Occurred() ? FAILED : DECLINED;
    if (before == Py_None || GET(Record, in_hbm, leaves) != the_VALID ||
        (GET(Record, at_home, leaves) != the_VALID && GET(Record, defined, leaves) != Py_False) ||
        PyLong_AsLongLong(GET(Record, leases, leaves)) || GET(Record, fixed, leaves) != Py_False ||
        GET(Record, in_hbm, comes) != the_ABSENT || GET(Record, at_home, comes) != the_VALID ||
        GET(Record, home, comes) != the_DRAM || GET(Record, home_extent, comes) == Py_None)
        return DECLINED;
    resized = !same(GET(Extent, nbytes, before), GET(Swap, nbytes, swap));
    if (resized && GET(Swap, fit, swap) == Py_None)
        return DECLINED;
    pointer = GET(Slot, pointer, slot);
    int pointed = PyLong_AsLongLong(GET(Slot, pointed, slot)) != 0;
    if (pointed && (GET(Slot, idle, slot) != Py_True || !IS(Pointing, pointer)))
        return DECLINED;
    if ((alone = is_unaliased(slot)) <= 0)
        return alone < 0 ? FAILED : DECLINED;
    home = GET(Record, home_extent, comes);
    source = PyDict_GetItemWithError(GET(Swapped, sources, swapped), GET(Extent, offset, home));
    if (!source)
        return PyErr_Occurred() ? FAILED : DECLINED;
    places = PyDict_GetItemWithError(GET(Swapped, kept, swapped), came);
    if (!places)
        return PyErr_Occurred() ? FAILED : DECLINED;
    place = PyDict_GetItemWithError(places, GET(Extent, offset, before));
    if (!place)
        return PyErr_Occurred() ? FAILED : DECLINED;
    extent = GET(Slot, extent, place);
    if (!same(GET(Extent, nbytes, extent), GET(Swap, nbytes, swap)))
        return DECLINED;
    again = PyDict_GetItemWithError(GET(Swapped, ready, swapped), went);
    if (!again && PyErr_Occurred())
        return FAILED;
    if (!again || (resized && PyLong_AsLongLong(GET(Swap, nbytes, swap)) >
                                  PyLong_AsLongLong(GET(Extent, nbytes, before))))
        again = Py_None; /* it stands for copies to the bytes behind the other as well */
    Py_INCREF(leaves), Py_INCREF(comes), Py_INCREF(before), Py_INCREF(slot), Py_INCREF(source);
    Py_INCREF(place), Py_INCREF(extent), Py_INCREF(again), Py_INCREF(went), Py_INCREF(came);
    Py_INCREF(swap);
    outcome = DONE;
    if (pointed) {
        Py_INCREF(pointer);
        int away = point_away(pointer);
        if (!away) {
            PyObject *done = PyObject_CallMethodNoArgs(pointer, s_away);
            away = done ? 1 : -1;
            Py_XDECREF(done);
        }
        Py_DECREF(pointer);
        if (away < 0)
            outcome = FAILED;
    }
    if (outcome == DONE) {
        if (resized)
            outcome = retake(shared, before, extent);
        if (outcome == DONE)
            outcome = exchange(shared, run, swap, slot, place, before, extent, source, again,
                               stream);
        if (outcome == FAILED)
            undo_swap(swapped, leaves, comes, before, extent, went, came);
    }
    Py_DECREF(leaves), Py_DECREF(comes), Py_DECREF(before), Py_DECREF(slot), Py_DECREF(source);
    Py_DECREF(place), Py_DECREF(extent), Py_DECREF(again), Py_DECREF(went), Py_DECREF(came);
    Py_DECREF(swap);
    return outcome;
}

/* -- uses ------------------------------------------------------------------------------------- */

/* What Replay.use does once it is known to make the use; a new reference to the slot. */
static PyObject *make_use(Shared *shared, PyObject *run, PyObject *step, PyObject *record,
                          PyObject *block_id, PyObject *stream)
{
    PyObject *swapped = shared->swapped, *swaps = GET(Step, swaps, step), *ready, *known, *slot;
    int outcome, differs;
    ready = PyDict_GetItemWithError(GET(Swapped, ready, swapped), block_id);
    if (!ready && PyErr_Occurred())
        return NULL;
    if (!(known = PyObject_GetAttr(shared->replay, s__stream)))
        return NULL;
    differs = !same(known, stream);
    Py_DECREF(known);
    Py_XINCREF(ready);
    outcome = 0;
    if (differs) {
        PyObject *done = PyObject_CallMethodOneArg(shared->copy, s_use, ready ? ready : Py_None);
        outcome = !done || PyObject_SetAttr(shared->replay, s__stream, stream);
        Py_XDECREF(done);
    } else if (ready && IS(Event, ready)) {
        if (!same(GET(Event, waiter, ready), stream))
            outcome = hold_up(shared, stream, ready);
    } else if (ready) {
        PyObject *done = PyObject_CallMethodOneArg(shared->copy, s_use, ready);
        outcome = !done;
        Py_XDECREF(done);
    }
    Py_XDECREF(ready);
    if (outcome)
        return NULL;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(swaps); index++) {
        PyObject *swap = PyList_GET_ITEM(swaps, index), *done;
        outcome = make_swap(shared, run, swap, stream);
        if (outcome == DECLINED) {
            Py_INCREF(swap);
            done = PyObject_CallMethodObjArgs(shared->replay, s__swap, run, swap, NULL);
            Py_DECREF(swap);
            if (!done)
                return NULL;
            differs = truth(done);
            Py_DECREF(done);
            outcome = differs < 0 ? FAILED : differs ? DONE : STOPPED;
        }
        if (outcome == FAILED)
            return NULL;
        if (outcome == STOPPED) {
            done = PyObject_CallMethodOneArg(shared->replay, s_go_on, block_id);
            if (!done)
                return NULL;
            Py_DECREF(done);
            break;
        }
    }
    slot = PyDict_GetItemWithError(GET(Swapped, current, swapped), block_id);
    if (!slot) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, block_id);
        return NULL;
    }
    Py_INCREF(slot);
    return slot;
}

/* Gives back the lease of a use that raises; the error stays. */
static void give_back(Shared *shared, PyObject *record, long long leases, PyObject *block_id)
{
    PyObject *type, *value, *trace, *done;
    PyErr_Fetch(&type, &value, &trace);
    if (PyLong_AsLongLong(GET(Record, leases, record)) > leases) {
        done = PyObject_CallMethodOneArg(GET(Swapped, table, shared->swapped), s_release,
                                         block_id);
        Py_XDECREF(done);
        if (!done) {
            Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
            return;
        }
    }
    PyErr_Restore(type, value, trace);
}

/* Notes that a fetch was of use: Waste.used. */
static int note_fetch(Shared *shared, PyObject *block_id)
{
    PyObject *fetch = PyDict_GetItemWithError(shared->pending, block_id), *waste, *found, *key;
    int judged;
    if (!fetch)
        return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(fetch);
    if (PyDict_DelItem(shared->pending, block_id)) {
        Py_DECREF(fetch);
        return -1;
    }
    waste = PyObject_GetAttr(GET(Swapped, transfers, shared->swapped), s_waste);
    found = waste ? PyObject_GetAttr(waste, s_outcomes) : NULL;
    judged = -1;
    if (found && (judged = truth(found)) > 0) {
        key = PyTuple_Pack(2, PyTuple_GET_ITEM(fetch, 1), block_id);
        judged = key ? PySequence_Contains(found, key) : -1;
        Py_XDECREF(key);
        if (judged > 0) {
            PyObject *judge = PyObject_GetAttr(waste, s_judge);
            PyObject *arguments[] = {PyTuple_GET_ITEM(fetch, 1), block_id, Py_False};
            PyObject *names = PyTuple_Pack(1, s_wasted);
            PyObject *done = judge && names ? PyObject_Vectorcall(judge, arguments, 2, names) : NULL;
            judged = done ? 0 : -1;
            Py_XDECREF(done), Py_XDECREF(names), Py_XDECREF(judge);
        }
    }
    Py_XDECREF(found), Py_XDECREF(waste);
    Py_DECREF(fetch);
    return judged;
}

/* Replay.use: the slot; NULL without an error where that is to decide. */
static PyObject *use_block(Shared *shared, PyObject *block_id)
{
    PyObject *run = PyObject_GetAttr(shared->replay, s_run), *planned = NULL, *stream = NULL;
    PyObject *found, *steps, *step, *record, *slot = NULL;
    long long cursor, leases;
    if (!run)
        return NULL;
    if (!IS(Run, run) ||
        !same(GET(Run, departures, run), GET(Departures, count, shared->departures)))
        goto out;
    if (!(planned = PyObject_GetAttr(shared->planner, s_cursor)))
        goto out;
    if (!same(planned, GET(Run, cursor, run)))
        goto out;
    cursor = PyLong_AsLongLong(planned) + 1;
    steps = GET(Run, steps, run);
    if (!PyList_CheckExact(steps) || cursor < 0 || cursor >= PyList_GET_SIZE(steps))
        goto out;
    step = PyList_GET_ITEM(steps, cursor);
    if (!IS(Step, step) || !same(GET(Step, block, step), block_id))
        goto out;
    record = GET(Step, used, step);
    if (!IS(Record, record) || !PyList_CheckExact(GET(Step, swaps, step)) ||
        (GET(Record, in_hbm, record) != the_VALID && GET(Record, in_hbm, record) != the_DIRTY))
        goto out;
    if (truth_of(shared->deferred, s_owed) || truth_of(shared->evictor, s_largest_later) ||
        truth_of(shared->pass_timer, s_sampling) || truth_of(shared->planner, s_exact) != 1)
        goto out;
    if (!(found = PyObject_CallNoArgs(shared->capturing)))
        goto out;
    int capturing = truth(found);
    Py_DECREF(found);
    if (capturing || !(stream = PyObject_CallNoArgs(shared->stream)))
        goto out;
    Py_SETREF(planned, PyLong_FromLongLong(cursor));
    if (!planned || PyObject_SetAttr(shared->planner, s_last, block_id) ||
        PyObject_SetAttr(shared->planner, s_cursor, planned))
        goto out;
    PUT(Run, cursor, run, planned);
    if (note_fetch(shared, block_id))
        goto out;
    Py_INCREF(record), Py_INCREF(step);
    leases = PyLong_AsLongLong(GET(Record, leases, record));
    if ((found = PyLong_FromLongLong(leases + 1))) {
        put_number(&GET(Record, leases, record), found);
        slot = make_use(shared, run, step, record, block_id, stream);
    }
    if (!slot)
        give_back(shared, record, leases, block_id);
    Py_DECREF(record), Py_DECREF(step);
out:
    Py_XDECREF(run), Py_XDECREF(planned), Py_XDECREF(stream);
    return slot;
}

static PyObject *group_of(Use *use)
{
    PyObject *group = PyWeakref_GetObject(use->group);
    if (!group || group == Py_None) {
        if (group)
            PyErr_SetString(PyExc_ReferenceError, "the group of this use is gone");
        return NULL;
    }
    Py_INCREF(group);
    return group;
}

/* Calls the function of Group in Python. */
static PyObject *in_python(PyObject *function, PyObject *group, PyObject *const *arguments,
                           Py_ssize_t count, PyObject *names)
{
    Py_ssize_t all = count + (names ? PyTuple_GET_SIZE(names) : 0);
    PyObject *with[8], *result;
    if (all > 6) {
        PyErr_SetString(PyExc_TypeError, "too many arguments");
        return NULL;
    }
    with[0] = group;
    for (Py_ssize_t index = 0; index < all; index++)
        with[index + 1] = arguments[index];
    result = PyObject_Vectorcall(function, with, count + 1, names);
    return result;
}

/* Group.hold_locked. */
static PyObject *hold(Use *use, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    Shared *shared = use->shared;
    PyObject *group = group_of(use), *holds, *slot = NULL, *result = NULL, *number;
    long long held;
    int pointed;
    if (!group)
        return NULL;
    if (count || names || !(holds = PyObject_GetAttr(group, s_holds)))
        goto python;
    held = PyLong_AsLongLong(holds);
    Py_DECREF(holds);
    if (held > 0) {
        if (truth_of(shared->deferred, s_owed) || !(number = PyLong_FromLongLong(held + 1)))
            goto python;
        if (!PyObject_SetAttr(group, s_holds, number))
            result = Py_NewRef(Py_None);
        Py_DECREF(number);
        goto out;
    }
    if (truth(GET(Writes, merging, use->writes)))
        goto python;
    if (!(slot = use_block(shared, use->block_id)))
        goto python;
    if (set_classes(GET(Pointing, shown, use->pointing)))
        goto out;
    if (slot != GET(Pointing, slot, use->pointing)) {
        if (!(pointed = point_plainly(use->pointing, slot))) {
            PyObject *plain = GET(Pointing, plain, use->pointing), *kind, *done = NULL;
            PyObject *bound = PyObject_GetAttr(use->pointing, s_point);
            PyObject *with[] = {slot, plain};
            kind = Py_BuildValue("(s)", "plain");
            if (bound && kind)
                done = PyObject_Vectorcall(bound, with, 1, kind);
            pointed = done ? 1 : -1;
            Py_XDECREF(done), Py_XDECREF(kind), Py_XDECREF(bound);
        }
        if (pointed < 0)
            goto out;
    }
    PUT(Slot, idle, slot, Py_False);
    if (PyObject_SetAttr(group, s_soft, Py_False) || !(number = PyLong_FromLong(1)))
        goto out;
    if (!PyObject_SetAttr(group, s_holds, number))
        result = Py_NewRef(Py_None);
    Py_DECREF(number);
    goto out;
python:
    if (!PyErr_Occurred())
        result = in_python(use->hold, group, arguments, count, names);
out:
    Py_XDECREF(slot);
    Py_DECREF(group);
    return result;
}

/* The sum of the version counters of a block's parameters; < 0 on error. */
static long long versions_of(PyObject *tensors)
{
    long long sum = 0;
    if (!PyList_CheckExact(tensors)) /* an empty tuple, before the first */
        return PyObject_Size(tensors) ? -1 : 0;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tensors); index++) {
        PyObject *found = PyObject_GetAttr(PyList_GET_ITEM(tensors, index), s__version);
        if (!found)
            return -1;
        sum += PyLong_AsLongLong(found);
        Py_DECREF(found);
    }
    return sum;
}

/* Group.let_go_locked. */
static PyObject *let_go(Use *use, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    PyObject *group = group_of(use), *holds, *slot, *number, *result = NULL;
    PyObject *writes = use->writes, *record = use->record, *always, *done;
    long long held, versions, leases;
    if (!group)
        return NULL;
    if (count || names || !(holds = PyObject_GetAttr(group, s_holds)))
        goto python;
    held = PyLong_AsLongLong(holds);
    Py_DECREF(holds);
    if (held > 1) {
        if (!(number = PyLong_FromLongLong(held - 1)))
            goto out;
        if (!PyObject_SetAttr(group, s_holds, number))
            result = Py_NewRef(Py_None);
        Py_DECREF(number);
        goto out;
    }
    slot = GET(Pointing, slot, use->pointing);
    versions = versions_of(GET(Writes, counted, writes));
    if (slot == Py_None || versions < 0 ||
        versions != PyLong_AsLongLong(GET(Writes, versions, writes)) ||
        references(GET(Slot, storage, slot)) != PyLong_AsLongLong(GET(Slot, baseline, slot)) +
                                                    PyLong_AsLongLong(GET(Slot, pointed, slot)) ||
        GET(Writes, suspect, writes) != Py_False)
        goto python;
    if (!(number = PyLong_FromLong(0)))
        goto out;
    if (PyObject_SetAttr(group, s_holds, number)) {
        Py_DECREF(number);
        goto out;
    }
    Py_DECREF(number);
    Py_INCREF(slot);
    if (!set_classes(GET(Pointing, hidden, use->pointing))) {
        PUT(Slot, idle, slot, Py_True);
        if (!PyObject_SetAttr(group, s_soft, Py_False)) {
            always = GET(Writes, always, writes);
            leases = PyLong_AsLongLong(GET(Record, leases, record));
            if (always == Py_False && leases) {
                if ((number = PyLong_FromLongLong(leases - 1))) {
                    put_number(&GET(Record, leases, record), number);
                    result = Py_NewRef(Py_None);
                }
            } else {
                PyObject *release =
                    PyObject_GetAttr(GET(Swapped, table, use->shared->swapped), s_release);
                PyObject *with[] = {use->block_id, always}, *kind = PyTuple_Pack(1, s_dirty);
                done = release && kind ? PyObject_Vectorcall(release, with, 1, kind) : NULL;
                Py_XDECREF(release), Py_XDECREF(kind);
                if (done)
                    result = Py_NewRef(Py_None);
                Py_XDECREF(done);
            }
        }
    }
    Py_DECREF(slot);
    goto out;
python:
    if (!PyErr_Occurred())
        result = in_python(use->let_go, group, arguments, count, names);
out:
    Py_DECREF(group);
    return result;
}

/* -- the module ------------------------------------------------------------------------------- */

static int shared_traverse(Shared *self, visitproc visit, void *arg)
{
#define VISIT_PART(name) Py_VISIT(self->name);
    PARTS(VISIT_PART)
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int shared_clear(Shared *self)
{
#define CLEAR_PART(name) Py_CLEAR(self->name);
    PARTS(CLEAR_PART)
    Py_CLEAR(self->up_number);
    return 0;
}

static void shared_dealloc(Shared *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    shared_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static int use_traverse(Use *self, visitproc visit, void *arg)
{
    Py_VISIT(self->shared);
    Py_VISIT(self->record);
    Py_VISIT(self->pointing);
    Py_VISIT(self->writes);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int use_clear(Use *self)
{
    Py_CLEAR(self->shared);
    Py_CLEAR(self->group);
    Py_CLEAR(self->block_id);
    Py_CLEAR(self->record);
    Py_CLEAR(self->pointing);
    Py_CLEAR(self->writes);
    Py_CLEAR(self->hold);
    Py_CLEAR(self->let_go);
    return 0;
}

static void use_dealloc(Use *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    use_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot shared_slots[] = {
    {Py_tp_traverse, shared_traverse}, {Py_tp_clear, shared_clear},
    {Py_tp_dealloc, shared_dealloc},   {0, NULL},
};
static PyType_Spec shared_spec = {"tiermem.Shared", sizeof(Shared), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                      Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                  shared_slots};
static PyType_Slot use_slots[] = {
    {Py_tp_traverse, use_traverse}, {Py_tp_clear, use_clear}, {Py_tp_dealloc, use_dealloc},
    {0, NULL},
};
static PyType_Spec use_spec = {"tiermem.Use", sizeof(Use), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                   Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               use_slots};
static PyTypeObject *shared_type, *use_type;

/* share(parts: dict) -> Shared */
static PyObject *share(PyObject *module, PyObject *parts)
{
    Shared *self = PyObject_GC_New(Shared, shared_type);
    PyObject *found;
    if (!self)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof(Shared) - sizeof(PyObject));
#define TAKE_PART(part)                                                                            \
    if (!(found = PyDict_GetItemString(parts, #part))) {                                           \
        PyErr_SetString(PyExc_KeyError, #part);                                                    \
        goto failed;                                                                               \
    }                                                                                              \
    self->part = Py_NewRef(found);
    PARTS(TAKE_PART)
    if (!IS(Swapped, self->swapped) || !IS(Departures, self->departures) ||
        !PyDict_CheckExact(self->pending)) {
        PyErr_SetString(PyExc_TypeError, "parts of another class");
        goto failed;
    }
    found = PyDict_GetItemString(parts, "driver"); /* up, device, record, wait, copy */
    if (found && found != Py_None) {
        unsigned long long up, record, wait, copy;
        if (!PyArg_ParseTuple(found, "KlKKK", &up, &self->device, &record, &wait, &copy))
            goto failed;
        self->record = (record_t)(uintptr_t)record, self->wait = (wait_t)(uintptr_t)wait;
        self->submit = (copy_t)(uintptr_t)copy;
        self->up_number = PyLong_FromUnsignedLongLong(up);
        if (!self->up_number || !PyDict_CheckExact(self->compute) ||
            !PyDict_CheckExact(self->marks)) {
            PyErr_SetString(PyExc_TypeError, "calls of another class");
            goto failed;
        }
        self->up = (void *)(uintptr_t)up;
    }
    PyObject_GC_Track(self);
    return (PyObject *)self;
failed:
    PyObject_GC_Track(self);
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef hold_def = {"hold_locked", (PyCFunction)(void (*)(void))hold,
                               METH_FASTCALL | METH_KEYWORDS, "Group.hold_locked, compiled."};
static PyMethodDef let_go_def = {"let_go_locked", (PyCFunction)(void (*)(void))let_go,
                                 METH_FASTCALL | METH_KEYWORDS, "Group.let_go_locked, compiled."};

/* uses_of(shared, weak reference to a group, id, record, pointing, writes, hold, let_go)
 * -> the two functions, bound */
static PyObject *uses_of(PyObject *module, PyObject *arguments)
{
    PyObject *shared, *group, *id, *record, *pointing, *writes, *holds, *lets_go, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O!OOOOOOO", shared_type, &shared, &group, &id, &record,
                          &pointing, &writes, &holds, &lets_go))
        return NULL;
    if (!IS(Record, record) || !IS(Pointing, pointing) || !IS(Writes, writes) ||
        !PyWeakref_Check(group) || !PyLong_CheckExact(id)) {
        PyErr_SetString(PyExc_TypeError, "parts of a group of another class");
        return NULL;
    }
    Use *self = PyObject_GC_New(Use, use_type);
    if (!self)
        return NULL;
    self->shared = (Shared *)Py_NewRef(shared);
    self->group = Py_NewRef(group), self->block_id = Py_NewRef(id);
    self->record = Py_NewRef(record), self->pointing = Py_NewRef(pointing);
    self->writes = Py_NewRef(writes), self->hold = Py_NewRef(holds);
    self->let_go = Py_NewRef(lets_go);
    PyObject_GC_Track(self);
    PyObject *first = PyCFunction_NewEx(&hold_def, (PyObject *)self, NULL);
    PyObject *second = PyCFunction_NewEx(&let_go_def, (PyObject *)self, NULL);
    if (first && second)
        result = PyTuple_Pack(2, first, second);
    Py_XDECREF(first), Py_XDECREF(second);
    Py_DECREF(self);
    return result;
}

/* -- calls of modules ------------------------------------------------------------------------- */

/* Stands in a module's __dict__ for its _call_impl in place of a CallInterceptor, whose attributes
 * it has; makes the calls of it that need no gradient. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *interceptor, *inner;
    PyObject *function, *module; /* of `inner`, where it is a bound method; else NULL */
    PyObject *quick, *inside, *here, *gate, *lock, *unwritten;
    PyObject *uses; /* a tuple of Use, one for each group */
} Call;

#define CALL_PARTS(X)                                                                              \
    X(interceptor) X(inner) X(function) X(module) X(quick) X(inside) X(here) X(gate) X(lock)       \
    X(unwritten) X(uses)

static int grad_enabled(void)
{
    PyObject *found = PyObject_CallNoArgs(the_is_grad_enabled);
    if (!found)
        return -1;
    int yes = truth(found);
    Py_DECREF(found);
    return yes;
}

static void set_inner(Call *self, PyObject *inner)
{
    Py_XSETREF(self->inner, Py_NewRef(inner));
    Py_CLEAR(self->function);
    Py_CLEAR(self->module);
    if (PyMethod_Check(inner)) {
        self->function = Py_NewRef(PyMethod_GET_FUNCTION(inner));
        self->module = Py_NewRef(PyMethod_GET_SELF(inner));
    }
}

/* Calls what was intercepted. */
static PyObject *call_inner(Call *self, PyObject *const *arguments, size_t flags, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (!self->function)
        return PyObject_Vectorcall(self->inner, arguments, flags, names);
    if (flags & PY_VECTORCALL_ARGUMENTS_OFFSET) { /* the place before them may be used */
        PyObject **with = (PyObject **)arguments - 1, *before = with[0], *result;
        with[0] = self->module;
        result = PyObject_Vectorcall(self->function, with, count + 1, names);
        with[0] = before;
        return result;
    }
    return PyObject_Vectorcall(self->inner, arguments, flags, names);
}

static PyObject *call_in_python(Call *self, PyObject *const *arguments, size_t flags,
                                PyObject *names)
{
    return PyObject_Vectorcall(self->interceptor, arguments, flags, names);
}

static int locked(Call *self, PyObject *name) /* acquires or releases the manager's lock */
{
    PyObject *done = PyObject_CallMethodNoArgs(self->lock, name);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Notes that an exception came amid the bookkeeping, unless it is a refusal; it stays. */
static PyObject *torn(Call *self)
{
    if (!PyErr_ExceptionMatches(the_REFUSALS)) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject_SetAttr(self->gate, s_torn, Py_True);
        PyObject_SetAttr(self->gate, s_unsure, Py_True);
        PyErr_Restore(type, value, trace);
    }
    return NULL;
}

/* Lets go of groups from one on, keeping the error there is. */
static void let_go_of(Call *self, Py_ssize_t first, Py_ssize_t behind)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (Py_ssize_t index = first; index < behind; index++) {
        PyObject *done = let_go((Use *)PyTuple_GET_ITEM(self->uses, index), NULL, 0, NULL);
        Py_XDECREF(done);
        if (!done) { /* the later one counts, as in Python */
            Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
            return;
        }
    }
    PyErr_Restore(type, value, trace);
}

/* Holds all groups of the call, under the lock; < 0 on error, with none of them held. */
static int hold_all(Call *self, PyObject *thread)
{
    Py_ssize_t count = PyTuple_GET_SIZE(self->uses), index;
    PyObject *inside = self->inside, *number;
    for (index = 0; index < count; index++) {
        PyObject *done = hold((Use *)PyTuple_GET_ITEM(self->uses, index), NULL, 0, NULL);
        if (!done) {
            if (PyErr_ExceptionMatches(the_REFUSALS))
                let_go_of(self, 0, index);
            return -1;
        }
        Py_DECREF(done);
    }
    long long depth = PyLong_AsLongLong(GET(Inside, depth, inside));
    if (!depth)
        PUT(Inside, thread, inside, thread);
    else if (!same(GET(Inside, thread, inside), thread)) {
        if (!(number = PyLong_FromLong(0))) /* until all are out again */
            return -1;
        put_number(&GET(Inside, thread, inside), number);
    }
    if (!(number = PyLong_FromLongLong(depth + 1)))
        return -1;
    put_number(&GET(Inside, depth, inside), number);
    return 0;
}

/* Lets go of all groups, under the lock. */
static int let_go_all(Call *self)
{
    Py_ssize_t count = PyTuple_GET_SIZE(self->uses);
    PyObject *inside = self->inside, *number;
    long long depth = PyLong_AsLongLong(GET(Inside, depth, inside)) - 1;
    if (!(number = PyLong_FromLongLong(depth)))
        return -1;
    put_number(&GET(Inside, depth, inside), number);
    if (!depth) {
        if (!(number = PyLong_FromLong(0)))
            return -1;
        put_number(&GET(Inside, thread, inside), number);
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *done = let_go((Use *)PyTuple_GET_ITEM(self->uses, index), NULL, 0, NULL);
        if (!done) {
            if (PyErr_ExceptionMatches(the_REFUSALS))
                let_go_of(self, index + 1, count);
            return -1;
        }
        Py_DECREF(done);
    }
    return 0;
}

/* Gives the lock back, whether or not what was done under it failed; the error stays. */
static int release(Call *self, int failed)
{
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    if (failed)
        PyErr_Fetch(&type, &value, &trace);
    if (locked(self, s_release)) {
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
        return -1;
    }
    if (failed)
        PyErr_Restore(type, value, trace);
    return failed;
}

/* What CallInterceptor.__call__ does of a call without gradients, inside another. */
static PyObject *call_held(Call *self, PyObject *const *arguments, size_t flags, PyObject *names,
                           PyObject *thread)
{
    PyObject *result, *type = NULL, *value = NULL, *trace = NULL, *done;
    int failed, watch;
    if (locked(self, s_acquire))
        return torn(self);
    failed = hold_all(self, thread);
    if (release(self, failed))
        return torn(self);
    result = call_inner(self, arguments, flags, names);
    if (!result)
        PyErr_Fetch(&type, &value, &trace);
    failed = locked(self, s_acquire);
    if (!failed)
        failed = release(self, let_go_all(self));
    if (failed) {
        Py_XDECREF(result), Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
        return torn(self);
    }
    if (!result) {
        PyErr_Restore(type, value, trace);
        if (!PyErr_ExceptionMatches(the_REFUSALS)) {
            PyErr_Fetch(&type, &value, &trace);
            PyErr_NormalizeException(&type, &value, &trace);
            if (trace)
                PyException_SetTraceback(value, trace);
            done = PyObject_CallMethodOneArg(self->interceptor, s_explain, value);
            if (done) { /* there is nothing to say beside it */
                Py_DECREF(done);
                PyErr_Restore(type, value, trace);
            } else {
                Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
            }
        }
        return NULL;
    }
    if ((watch = grad_enabled())) { /* the module has turned gradients on */
        PyObject *scope = PyObject_GetAttrString(self->interceptor, "scope"), *runtime;
        runtime = scope ? PyObject_GetAttrString(self->interceptor, "runtime") : NULL;
        done = watch > 0 && runtime
                   ? PyObject_CallMethodObjArgs(self->interceptor, s__watch, scope, runtime, result,
                                                Py_False, NULL)
                   : NULL;
        Py_XDECREF(scope), Py_XDECREF(runtime), Py_XDECREF(done);
        if (!done)
            Py_CLEAR(result);
    }
    return result;
}

static PyObject *call(PyObject *callable, PyObject *const *arguments, size_t flags,
                      PyObject *names)
{
    Call *self = (Call *)callable;
    PyObject *thread, *result;
    int grad = grad_enabled(), plain;
    if (grad)
        return grad < 0 ? NULL : call_in_python(self, arguments, flags, names);
    if (!(thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident())))
        return NULL;
    Py_INCREF(self); /* what it calls may take the interceptor out */
    if (same(GET(Inside, thread, self->quick), thread))
        result = call_inner(self, arguments, flags, names);
    else {
        plain = truth_of(self->gate, s_unsure) == 0 && truth_of(self->here, s_inside) == 1 &&
                truth(self->unwritten) == 0;
        if (PyErr_Occurred())
            result = NULL;
        else if (plain)
            result = call_held(self, arguments, flags, names, thread);
        else
            result = call_in_python(self, arguments, flags, names);
    }
    Py_DECREF(thread);
    Py_DECREF(self);
    return result;
}

static PyObject *call_getattr(PyObject *object, PyObject *name)
{
    return PyObject_GetAttr(((Call *)object)->interceptor, name);
}

static int call_setattr(PyObject *object, PyObject *name, PyObject *value)
{
    Call *self = (Call *)object;
    if (value && PyUnicode_Compare(name, s_inner) == 0)
        set_inner(self, value);
    return value ? PyObject_SetAttr(self->interceptor, name, value)
                 : PyObject_DelAttr(self->interceptor, name);
}

static int call_traverse(Call *self, visitproc visit, void *arg)
{
#define VISIT_CALL_PART(name) Py_VISIT(self->name);
    CALL_PARTS(VISIT_CALL_PART)
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int call_clear(Call *self)
{
#define CLEAR_CALL_PART(name) Py_CLEAR(self->name);
    CALL_PARTS(CLEAR_CALL_PART)
    return 0;
}

static void call_dealloc(Call *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    call_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot call_slots[] = {
    {Py_tp_traverse, call_traverse},   {Py_tp_clear, call_clear},
    {Py_tp_dealloc, call_dealloc},     {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattro, call_getattr},    {Py_tp_setattro, call_setattr},
    {Py_tp_members, call_members},     {0, NULL},
};
static PyType_Spec call_spec = {"tiermem.Call", sizeof(Call), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                    Py_TPFLAGS_HAVE_VECTORCALL |
                                    Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                call_slots};
static PyTypeObject *call_type;

/* call_of(interceptor, inner, quick, inside, here, gate, lock, unwritten, the first function of
 * uses_of for each group) -> Call */
static PyObject *call_of(PyObject *module, PyObject *arguments)
{
    PyObject *interceptor, *inner, *quick, *inside, *here, *gate, *lock, *unwritten;
    PyObject *functions, *uses;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOO!", &interceptor, &inner, &quick, &inside, &here,
                          &gate, &lock, &unwritten, &PyTuple_Type, &functions))
        return NULL;
    if (!IS(Inside, quick) || !IS(Inside, inside)) {
        PyErr_SetString(PyExc_TypeError, "parts of an interceptor of another class");
        return NULL;
    }
    if (!(uses = PyTuple_New(PyTuple_GET_SIZE(functions))))
        return NULL;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(functions); index++) {
        PyObject *function = PyTuple_GET_ITEM(functions, index);
        PyObject *use = PyCFunction_Check(function) ? PyCFunction_GET_SELF(function) : NULL;
        if (!use || Py_TYPE(use) != use_type) {
            Py_DECREF(uses);
            PyErr_SetString(PyExc_TypeError, "a function that is no hold_locked of uses_of");
            return NULL;
        }
        PyTuple_SET_ITEM(uses, index, Py_NewRef(use));
    }
    Call *self = PyObject_GC_New(Call, call_type);
    if (!self) {
        Py_DECREF(uses);
        return NULL;
    }
    self->vectorcall = call;
    self->inner = self->function = self->module = NULL;
    self->interceptor = Py_NewRef(interceptor), self->quick = Py_NewRef(quick);
    self->inside = Py_NewRef(inside), self->here = Py_NewRef(here), self->gate = Py_NewRef(gate);
    self->lock = Py_NewRef(lock), self->unwritten = Py_NewRef(unwritten);
    self->uses = uses;
    set_inner(self, inner);
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int offset_of(PyTypeObject *class, const char *name, Py_ssize_t *offset)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)class, name);
    if (!found)
        return -1;
    if (Py_TYPE(found) != &PyMemberDescr_Type ||
        ((PyMemberDescrObject *)found)->d_member->type != T_OBJECT_EX) {
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", class->tp_name, name);
        Py_DECREF(found);
        return -1;
    }
    *offset = ((PyMemberDescrObject *)found)->d_member->offset;
    Py_DECREF(found);
    return 0;
}

/* bind(names: dict): tells the classes, and other objects; once, before anything else */
static PyObject *bind(PyObject *module, PyObject *names)
{
    PyObject *found;
#define FIND(text)                                                                                 \
    if (!(found = PyDict_GetItemString(names, text))) {                                            \
        PyErr_SetString(PyExc_KeyError, text);                                                     \
        return NULL;                                                                               \
    }
#define BIND_CLASS(class)                                                                          \
    FIND(#class)                                                                                   \
    if (!PyType_Check(found)) {                                                                    \
        PyErr_SetString(PyExc_TypeError, #class);                                                  \
        return NULL;                                                                               \
    }                                                                                              \
    class##_class = (PyTypeObject *)Py_NewRef(found);
    CLASSES(BIND_CLASS)
#define BIND_MEMBER(class, member)                                                                 \
    if (offset_of(class##_class, #member, &class##_##member))                                      \
        return NULL;
    MEMBERS(BIND_MEMBER)
#define BIND_THING(name)                                                                           \
    FIND(#name)                                                                                    \
    the_##name = Py_NewRef(found);
    THINGS(BIND_THING)
#define BIND_NAME(name)                                                                            \
    if (!(s_##name = PyUnicode_InternFromString(#name)))                                           \
        return NULL;
    NAMES(BIND_NAME)
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_O, "Tells the classes and other objects."},
    {"share", share, METH_O, "Makes what all uses of a manager share."},
    {"uses_of", uses_of, METH_VARARGS, "Returns hold_locked and let_go_locked of a group."},
    {"call_of", call_of, METH_VARARGS, "Returns what stands for an interceptor of calls."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tiermem_uses", NULL, -1,
                                        functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tiermem_uses(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    shared_type = (PyTypeObject *)PyType_FromSpec(&shared_spec);
    use_type = (PyTypeObject *)PyType_FromSpec(&use_spec);
    call_type = (PyTypeObject *)PyType_FromSpec(&call_spec);
    if (!shared_type || !use_type || !call_type)
        return NULL;
    return module;
}
