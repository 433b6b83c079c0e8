/* A tool of NVTX for tests: it writes what it receives as lines of text. NVTX loads it by NVTX_INJECTION64_PATH. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*get_table)(int module, Function*** table, unsigned* size);
} Callbacks;

/* nvtxEventAttributes_t of version 2 and later */
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void* message;
} Attributes;

static FILE* out;
static uint64_t last;

static void quoted(const char* text) {
    for (; *text; text++) fprintf(out, "%02x", (unsigned char)*text);
    if (!*text) fputc('\n', out);
}

static void* create_domain(const char* name) {
    fprintf(out, "domain ");
    quoted(name);
    return strdup(name);
}

static void* register_string(void* domain, const char* text) {
    (void)domain;
    return strdup(text);
}

static void name_category(void* domain, uint32_t category, const char* name) {
    (void)domain;
    fprintf(out, "category %u ", category);
    quoted(name);
}

static uint64_t start(void* domain, const Attributes* attributes) {
    (void)domain;
    fprintf(out, "start %llu %u %u ", (unsigned long long)++last, attributes->category, attributes->color);
    quoted(attributes->message);
    return last;
}

static void end(void* domain, uint64_t id) {
    (void)domain;
    fprintf(out, "end %llu\n", (unsigned long long)id);
    fflush(out);
}

int InitializeInjectionNvtx2(const void* (*get_export_table)(uint32_t)) {
    const Callbacks* callbacks = get_export_table(1);
    Function** table;
    unsigned size;
    out = fopen(getenv("NVTX_TEST_OUTPUT"), "w");
    if (!out || !callbacks || !callbacks->get_table(5, &table, &size)) return 0; /* NVTX_CB_MODULE_CORE2 */
    *table[2] = (Function)start; /* NVTX_CBID_CORE2_DomainRangeStartEx and so on */
    *table[3] = (Function)end;
    *table[8] = (Function)name_category;
    *table[10] = (Function)register_string;
    *table[12] = (Function)create_domain;
    return 1;
}
