/* A libcuda that records its calls and answers what a test has scripted. It has no device.
 *
 * Every function takes eight 64-bit words: with the C calling conventions of x86-64 and aarch64 that is how pointers, sizes,
 * integers and an eight-byte structure by value arrive. A 32-bit argument's upper half is not defined: the test masks it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t U;
enum { NAME = 48, LOG = 4096, DEPTH = 16 };

/* name, number of the out argument (from 1; 0: none), its bytes. Of 8 bytes, a new handle is written by default. */
#define FUNCTIONS(X)                                                                                                  \
    X(cuInit, 0, 0) X(cuGetErrorName, 0, 0) X(cuGetErrorString, 0, 0) X(cuDeviceGetCount, 1, 4) X(cuDeviceGet, 0, 0) \
    X(cuDeviceGetName, 0, 0) X(cuDeviceGetAttribute, 0, 0) X(cuDeviceTotalMem, 1, 8) X(cuDeviceCanAccessPeer, 1, 4)  \
    X(cuDevicePrimaryCtxRetain, 1, 8) X(cuDevicePrimaryCtxRelease, 0, 0) X(cuDevicePrimaryCtxGetState, 3, 4)         \
    X(cuCtxGetCurrent, 0, 0) X(cuCtxGetDevice, 1, 4) X(cuCtxPushCurrent, 0, 0) X(cuCtxPopCurrent, 0, 0)              \
    X(cuCtxEnablePeerAccess, 0, 0)                                                                                    \
    X(cuCtxGetStreamPriorityRange, 0, 0) X(cuStreamCreateWithPriority, 1, 8) X(cuStreamDestroy, 0, 0)                \
    X(cuStreamGetPriority, 2, 4) X(cuStreamGetDevice, 2, 4) X(cuStreamQuery, 0, 0) X(cuStreamSynchronize, 0, 0)      \
    X(cuStreamWaitEvent, 0, 0) X(cuStreamIsCapturing, 2, 4) X(cuThreadExchangeStreamCaptureMode, 0, 0)               \
    X(cuEventCreate, 1, 8) X(cuEventDestroy, 0, 0) X(cuEventRecord, 0, 0) X(cuEventQuery, 0, 0)                      \
    X(cuEventElapsedTime, 1, 4) X(cuLaunchHostFunc, 0, 0) X(cuLibraryLoadData, 1, 8) X(cuLibraryUnload, 0, 0)        \
    X(cuLibraryGetKernel, 1, 8) X(cuKernelGetFunction, 1, 8) X(cuFuncLoad, 0, 0) X(cuFuncGetParamInfo, 0, 0)         \
    X(cuFuncGetAttribute, 1, 4) X(cuFuncSetAttribute, 0, 0) X(cuLaunchKernelEx, 0, 0) X(cuMemGetInfo, 0, 0)          \
    X(cuMemPoolCreate, 1, 8) X(cuMemPoolDestroy, 0, 0) X(cuMemPoolSetAttribute, 0, 0) X(cuMemPoolGetAttribute, 3, 8) \
    X(cuMemPoolSetAccess, 0, 0) X(cuMemPoolTrimTo, 0, 0) X(cuMemAllocFromPoolAsync, 1, 8) X(cuMemFreeAsync, 0, 0)    \
    X(cuMemHostAlloc, 1, 8) X(cuMemFreeHost, 0, 0) X(cuMemHostRegister, 0, 0) X(cuMemHostUnregister, 0, 0)           \
    X(cuMemAllocManaged, 1, 8) X(cuMemFree, 0, 0) X(cuMemcpyHtoDAsync, 0, 0) X(cuMemcpyDtoHAsync, 0, 0)              \
    X(cuMemcpyDtoDAsync, 0, 0) X(cuMemcpyPeerAsync, 0, 0) X(cuMemsetD8Async, 0, 0) X(cuMemsetD16Async, 0, 0)         \
    X(cuMemsetD32Async, 0, 0) X(cuMemsetD2D32Async, 0, 0) X(cuMemPrefetchAsync, 0, 0) X(cuGraphCreate, 1, 8)         \
    X(cuGraphAddKernelNode, 1, 8) X(cuGraphAddMemcpyNode, 1, 8) X(cuGraphAddMemsetNode, 1, 8)                        \
    X(cuGraphAddEmptyNode, 1, 8) X(cuGraphInstantiateWithParams, 1, 8) X(cuGraphExecKernelNodeSetParams, 0, 0)       \
    X(cuGraphExecMemcpyNodeSetParams, 0, 0) X(cuGraphExecMemsetNodeSetParams, 0, 0) X(cuGraphLaunch, 0, 0)           \
    X(cuGraphExecDestroy, 0, 0) X(cuGraphDestroy, 0, 0) X(cuMemAdvise, 0, 0) X(cuMemRangeGetAttribute, 1, 4)     \
    X(cuPointerGetAttributes, 0, 0)

#define NUMBER(name, out, bytes) I_##name,
enum { FUNCTIONS(NUMBER) COUNT };

typedef struct { /* what the test reads; see fake.py */
    char name[NAME];
    U argument[8];
    int code;
    int gil; /* did the calling thread hold the GIL? */
    U context; /* the context current on it */
} Call;

typedef struct {
    int code, times; /* answer this code, so many times (-1: for ever) */
    int has_value;
    U value; /* for the out argument */
} Script;

static struct {
    Call log[LOG];
    int calls;
    Script script[COUNT];
    U next_handle;
    int missing; /* the function that cuGetProcAddress does not find; -1: none */
    int versions[COUNT]; /* the version that was asked for */
    int flags;
    int parameters; /* of every kernel */
    U offset[16], size[16];
    unsigned char config[64], packed[512]; /* of the last launch */
    unsigned char bytes[256]; /* of the last structure passed by address */
    U waits[16]; /* of the last node of a graph */
    int held; /* host functions wait */
    int running; /* host functions not yet returned */
} S;

static int version = 13000;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread U stack[DEPTH];
static __thread int depth;
static __thread int capture_mode;
static int (*holds_gil)(void);

typedef struct { void (*run)(void *); void *data; } HostFunction;

static void *host_thread(void *data) {
    HostFunction function = *(HostFunction *)data;
    pthread_mutex_lock(&lock);
    while (S.held) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    function.run(function.data);
    pthread_mutex_lock(&lock);
    S.running--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void node(U waits, U count, U structure, int bytes) { /* a node of a graph, or its new parameters (count: 0) */
    if (count) memcpy(S.waits, (void *)waits, 8 * count);
    if (bytes) memcpy(S.bytes, (void *)structure, bytes);
    if (bytes != 72) return;
    memset(S.packed, 0xEE, sizeof S.packed);
    for (int i = 0; i < S.parameters; i++) memcpy(S.packed + S.offset[i], (*(void ***)(structure + 40))[i], S.size[i]);
}

static int effect(int which, U a, U b, U c, U d, U e) { /* under the lock; what a function does beyond one out argument */
    static HostFunction functions[LOG];
    static int made;
    int old;
    switch (which) {
    case I_cuGetErrorName:
    case I_cuGetErrorString:
        if ((int)a != 2 && (int)a != 700) return 1;
        *(const char **)b = which == I_cuGetErrorName ? ((int)a == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_ILLEGAL_ADDRESS")
                                                      : "as described";
        return 0;
    case I_cuDeviceGet: *(int *)a = (int)b; return 0;
    case I_cuDeviceGetName: strcpy((char *)a, "Fake GPU"); return 0;
    case I_cuDeviceGetAttribute: *(int *)a = (int)b; return 0; /* every attribute has its own number as its value */
    case I_cuCtxGetCurrent: *(U *)a = depth ? stack[depth - 1] : 0; return 0;
    case I_cuCtxPushCurrent: stack[depth++] = a; return 0;
    case I_cuCtxPopCurrent: *(U *)a = stack[--depth]; return 0;
    case I_cuCtxGetStreamPriorityRange: *(int *)a = 0; *(int *)b = -5; return 0;
    case I_cuPointerGetAttributes: /* d is the address, and says what the answer is: kind, device, a nibble each, managed */
        for (int i = 0; i < (int)a; i++)
            switch (((int *)b)[i]) {
            case 2: *(unsigned *)((void **)c)[i] = d >> 60 & 3; break;
            case 8: *(unsigned char *)((void **)c)[i] = d >> 62 & 1; break;
            case 9: *(int *)((void **)c)[i] = d >> 56 & 15; break;
            case 11: *(U *)((void **)c)[i] = d & ~(U)0xFFF; break;
            case 12: *(U *)((void **)c)[i] = 0x1000; break;
            default: return 1;
            }
        return 0;
    case I_cuMemGetInfo: *(U *)a = 1000; *(U *)b = 2000; return 0;
    case I_cuThreadExchangeStreamCaptureMode: old = capture_mode; capture_mode = *(int *)a; *(int *)a = old; return 0;
    case I_cuMemPoolCreate: memcpy(S.bytes, (void *)b, 88); return 0;
    case I_cuMemPoolSetAttribute: memcpy(S.bytes, (void *)c, 8); return 0;
    case I_cuMemPoolSetAccess: memcpy(S.bytes, (void *)b, 12); return 0;
    case I_cuGraphAddEmptyNode: node(c, d, 0, 0); return 0;
    case I_cuGraphAddKernelNode: node(c, d, e, 72); return 0;
    case I_cuGraphAddMemcpyNode: node(c, d, e, 200); return 0;
    case I_cuGraphAddMemsetNode: node(c, d, e, 40); return 0;
    case I_cuGraphInstantiateWithParams: memcpy(S.bytes, (void *)c, 32); return 0;
    case I_cuGraphExecKernelNodeSetParams: node(0, 0, c, 72); return 0;
    case I_cuGraphExecMemcpyNodeSetParams: node(0, 0, c, 200); return 0;
    case I_cuGraphExecMemsetNodeSetParams: node(0, 0, c, 40); return 0;
    case I_cuFuncGetParamInfo:
        if (b >= (U)S.parameters) return 1;
        *(U *)c = S.offset[b];
        *(U *)d = S.size[b];
        return 0;
    case I_cuLaunchKernelEx:
        memcpy(S.config, (void *)a, 56);
        memset(S.packed, 0xEE, sizeof S.packed);
        for (int i = 0; i < S.parameters; i++) memcpy(S.packed + S.offset[i], ((void **)c)[i], S.size[i]);
        return 0;
    case I_cuLaunchHostFunc: {
        HostFunction *function = &functions[made++ % LOG];
        pthread_t thread;
        function->run = (void (*)(void *))b;
        function->data = (void *)c;
        S.running++;
        pthread_create(&thread, 0, host_thread, function);
        pthread_detach(thread);
        return 0;
    }
    }
    return 0;
}

static int answer(int which, const char *name, int out, int bytes, U a, U b, U c, U d, U e, U f, U g, U h) {
    U words[8] = {a, b, c, d, e, f, g, h};
    Script *script = &S.script[which];
    int code = 0;
    pthread_mutex_lock(&lock);
    if (script->times) {
        code = script->code;
        if (script->times > 0) script->times--;
    }
    if (!code) code = effect(which, a, b, c, d, e);
    if (!code && out) {
        U value = script->has_value ? script->value : bytes == 8 ? (S.next_handle += 16) : 0;
        memcpy((void *)words[out - 1], &value, bytes);
    }
    if (which != I_cuGetErrorName && which != I_cuGetErrorString && S.calls < LOG) {
        Call *call = &S.log[S.calls++];
        strcpy(call->name, name);
        memcpy(call->argument, words, sizeof words);
        call->code = code;
        call->gil = holds_gil ? holds_gil() : -1;
        call->context = depth ? stack[depth - 1] : 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

#define DEFINE(name, out, bytes)                                                                                      \
    static int f_##name(U a, U b, U c, U d, U e, U f, U g, U h) {                                                     \
        return answer(I_##name, #name, out, bytes, a, b, c, d, e, f, g, h);                                           \
    }
FUNCTIONS(DEFINE)

#define ROW(name, out, bytes) {#name, (void *)f_##name},
static struct { const char *name; void *address; } table[] = {FUNCTIONS(ROW)};

static int find(const char *name) {
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(table[i].name, name)) return i;
    return -1;
}

/* What a libcuda exports */

int cuDriverGetVersion(int *out) { *out = version; return 0; }

int cuGetProcAddress_v2(const char *name, void **address, int asked, uint64_t flags, int *status) {
    int which = find(name), found = which >= 0 && which != S.missing;
    *address = found ? table[which].address : 0;
    *status = found ? 0 : 1;
    if (which >= 0) S.versions[which] = asked;
    S.flags = (int)flags;
    return 0;
}

/* What the test drives it with */

void fake_reset(void) {
    pthread_mutex_lock(&lock);
    S.held = 0; /* lets what the last test held go */
    pthread_cond_broadcast(&changed);
    while (S.running) pthread_cond_wait(&changed, &lock);
    memset(&S, 0, sizeof S);
    S.next_handle = 0x7f0000001000;
    S.missing = -1;
    version = 13000;
    depth = capture_mode = 0;
    holds_gil = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    pthread_mutex_unlock(&lock);
}

void *fake_state(void) { return &S; }
void fake_forget(void) { S.calls = 0; }
void fake_version(int to) { version = to; }
void fake_missing(const char *name) { S.missing = find(name); }
int fake_asked(const char *name) { return S.versions[find(name)]; }
int fake_flags(void) { return S.flags; }
void fake_answer(const char *name, int code, int times) { Script *s = &S.script[find(name)]; s->code = code; s->times = times; }
void fake_value(const char *name, U value) { Script *s = &S.script[find(name)]; s->has_value = 1; s->value = value; }
void fake_parameter(int at, U offset, U size) { S.offset[at] = offset; S.size[at] = size; S.parameters = at + 1; }
void fake_launch(unsigned char *config, unsigned char *packed) { memcpy(config, S.config, 56); memcpy(packed, S.packed, 512); }
void fake_bytes(unsigned char *to, int n) { memcpy(to, S.bytes, n); }
void fake_waits(U *to, int n) { memcpy(to, S.waits, 8 * n); }
void fake_push(U context) { stack[depth++] = context; }
int fake_capture_mode(int to) { if (to >= 0) capture_mode = to; return capture_mode; }
U fake_current(void) { return depth ? stack[depth - 1] : 0; }
void fake_hold(int held) {
    pthread_mutex_lock(&lock);
    S.held = held;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
