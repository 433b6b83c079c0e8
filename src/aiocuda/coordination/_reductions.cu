// The kernels of reduce and all_reduce. `python -m tests.coordination.reductions` writes `_reductions.ptx.xz`.
//
// Each kernel folds up to 8 sources, in their order, and writes the result to up to 8 targets. A target may be one of
// the sources: each item is read by the thread that writes it, before the write. With CONTINUES it begins with the
// partial results of an earlier launch, with UNFINISHED it leaves partial results instead of writing the targets.
//
// Without these flags, and if all pointers are multiples of 16, a thread takes 16 bytes of each buffer at once. The loads
// of all sources are independent of each other, which keeps enough bytes in flight to reach the memory's bandwidth.

#define CONTINUES 1
#define UNFINISHED 2

// Halves are folded in float32, and rounded once. bfloat16 has no conversion instructions in compute_75.
struct half_item { unsigned short bits; };
struct bfloat_item { unsigned short bits; };

template <class Wide, class Item> __device__ Wide widen(Item item) { return item; }
template <> __device__ float widen<float, half_item>(half_item item)
{
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(item.bits));
    return wide;
}
template <> __device__ float widen<float, bfloat_item>(bfloat_item item)
{
    return __int_as_float((int)((unsigned int)item.bits << 16));
}

template <class Item, class Wide> struct Narrow { static __device__ Item of(Wide wide) { return (Item)wide; } };
template <> struct Narrow<half_item, float> {
    static __device__ half_item of(float wide)
    {
        half_item item;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(item.bits) : "f"(wide));
        return item;
    }
};
template <> struct Narrow<bfloat_item, float> {
    static __device__ bfloat_item of(float wide)
    {
        unsigned int bits = (unsigned int)__float_as_int(wide);
        bfloat_item item;
        item.bits = wide != wide ? 0x7fc0 : (unsigned short)((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
        return item;
    }
};

// The result of minimum and maximum is a NaN if one of the two is.
struct Sum { template <class T> static __device__ T of(T a, T b) { return a + b; } };
struct Product { template <class T> static __device__ T of(T a, T b) { return a * b; } };
struct Minimum { template <class T> static __device__ T of(T a, T b) { return a != a || a < b ? a : b; } };
struct Maximum { template <class T> static __device__ T of(T a, T b) { return a != a || a > b ? a : b; } };

template <class Item> struct __align__(16) Pack { Item items[16 / sizeof(Item)]; };

// Fold packs of 16 bytes, and return how many items that were.
template <class Operation, class Item, class Wide>
__device__ long long fold_packs(long long n, int sources, int targets, const Item *const *from, Item *const *to)
{
    constexpr int SIZE = 16 / sizeof(Item);
    unsigned long long pointers = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        pointers |= (unsigned long long)from[k] | (unsigned long long)to[k];
    if (pointers % 16)
        return 0;
    long long packs = n / SIZE, step = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step) {
        Pack<Item> read[8], result;
        Wide total[SIZE];
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < sources)
                read[k] = ((const Pack<Item> *)from[k])[i];
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            total[j] = widen<Wide>(read[0].items[j]);
#pragma unroll
        for (int k = 1; k < 8; k++)
            if (k < sources) {
#pragma unroll
                for (int j = 0; j < SIZE; j++)
                    total[j] = Operation::of(total[j], widen<Wide>(read[k].items[j]));
            }
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            result.items[j] = Narrow<Item, Wide>::of(total[j]);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < targets)
                ((Pack<Item> *)to[k])[i] = result;
    }
    return packs * SIZE;
}

template <class Operation, class Item, class Wide>
__device__ void fold(long long n, int sources, int targets, int flags, Wide *partial, const Item *const *from,
                     Item *const *to)
{
    long long step = (long long)gridDim.x * blockDim.x;
    long long first = flags ? 0 : fold_packs<Operation, Item, Wide>(n, sources, targets, from, to);
#pragma unroll 1
    for (long long i = first + (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        Wide total;
        if (flags & CONTINUES)
            total = Operation::of(partial[i], widen<Wide>(from[0][i]));
        else
            total = widen<Wide>(from[0][i]);
#pragma unroll
        for (int k = 1; k < 8; k++)
            if (k < sources)
                total = Operation::of(total, widen<Wide>(from[k][i]));
        if (flags & UNFINISHED) {
            partial[i] = total;
            continue;
        }
        Item item = Narrow<Item, Wide>::of(total);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < targets)
                to[k][i] = item;
    }
}

#define KERNEL(name, Operation, Item, Wide)                                                                      \
    extern "C" __global__ void name(long long n, int sources, int targets, int flags, void *partial,             \
                                    const Item *s0, const Item *s1, const Item *s2, const Item *s3,              \
                                    const Item *s4, const Item *s5, const Item *s6, const Item *s7,              \
                                    Item *t0, Item *t1, Item *t2, Item *t3, Item *t4, Item *t5, Item *t6,        \
                                    Item *t7)                                                                    \
    {                                                                                                            \
        const Item *from[8] = {s0, s1, s2, s3, s4, s5, s6, s7};                                                  \
        Item *to[8] = {t0, t1, t2, t3, t4, t5, t6, t7};                                                          \
        fold<Operation, Item, Wide>(n, sources, targets, flags, (Wide *)partial, from, to);                      \
    }

#define SUM_AND_PRODUCT(type, Item, Wide)                                                                        \
    KERNEL(sum_##type, Sum, Item, Wide)                                                                          \
    KERNEL(product_##type, Product, Item, Wide)
#define EXTREMES(type, Item, Wide)                                                                               \
    KERNEL(minimum_##type, Minimum, Item, Wide)                                                                  \
    KERNEL(maximum_##type, Maximum, Item, Wide)

// Integers wrap: the sum and the product of signed integers have the bits of those of unsigned integers.
SUM_AND_PRODUCT(uint8, unsigned char, unsigned char)
SUM_AND_PRODUCT(uint16, unsigned short, unsigned short)
SUM_AND_PRODUCT(uint32, unsigned int, unsigned int)
SUM_AND_PRODUCT(uint64, unsigned long long, unsigned long long)
SUM_AND_PRODUCT(float16, half_item, float)
SUM_AND_PRODUCT(bfloat16, bfloat_item, float)
SUM_AND_PRODUCT(float32, float, float)
SUM_AND_PRODUCT(float64, double, double)
EXTREMES(int8, signed char, signed char)
EXTREMES(int16, short, short)
EXTREMES(int32, int, int)
EXTREMES(int64, long long, long long)
EXTREMES(uint8, unsigned char, unsigned char)
EXTREMES(uint16, unsigned short, unsigned short)
EXTREMES(uint32, unsigned int, unsigned int)
EXTREMES(uint64, unsigned long long, unsigned long long)
EXTREMES(float16, half_item, float)
EXTREMES(bfloat16, bfloat_item, float)
EXTREMES(float32, float, float)
EXTREMES(float64, double, double)
