/* A libcuda.so.1 that runs nothing. It reads from each cubin how many arguments a kernel takes and how large each is
 * (.nv.info.<kernel>, EIATTR_KPARAM_INFO), and logs what a driver would have copied at each launch to $STUB_LOG, one
 * JSON object a line. $STUB_ARCH is the architecture; $STUB_FAILS names a function that fails. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
struct module;
typedef struct { struct module *module; char name[128]; int count; unsigned size[64]; int dynamic, threads; } function_t;
typedef struct module { const unsigned char *image; uint32_t crc; function_t function; } module_t; /* of one kernel */
enum { INVALID_VALUE = 1, NO_BINARY = 200, NOT_FOUND = 500, FAILED = 999 };

static FILE *log_file;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void open_log(void) {
    const char *path = getenv("STUB_LOG");
    log_file = fopen(path ? path : "/dev/null", "a");
    if (log_file) setvbuf(log_file, NULL, _IOLBF, 0);
}
static int fails(const char *name) {
    const char *wanted = getenv("STUB_FAILS");
    return wanted && !strcmp(wanted, name);
}

/* ---- reading cubins (ELF, 64 bits, little endian) ---- */

static uint64_t number(const unsigned char *p, int bytes) {
    uint64_t value = 0;
    memcpy(&value, p, (size_t)bytes);
    return value;
}
static uint64_t section_table(const unsigned char *e) { return number(e + 0x28, 8); }
static uint64_t section_bytes(const unsigned char *e) { return number(e + 0x3A, 2); }
static uint64_t sections(const unsigned char *e) { return number(e + 0x3C, 2); }

static size_t elf_size(const unsigned char *e) {
    uint64_t end = section_table(e) + section_bytes(e) * sections(e);
    uint64_t programs_end = number(e + 0x20, 8) + number(e + 0x36, 2) * number(e + 0x38, 2);
    return (size_t)(end > programs_end ? end : programs_end);
}

static uint32_t crc32(const unsigned char *p, size_t n) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

static int read_parameters(function_t *f) {
    char wanted[160];
    const unsigned char *e = f->module->image, *table = e + section_table(e);
    uint64_t each = section_bytes(e);
    const unsigned char *names = e + number(table + number(e + 0x3E, 2) * each + 0x18, 8);
    snprintf(wanted, sizeof wanted, ".nv.info.%s", f->name);
    for (uint64_t i = 0; i < sections(e); i++) {
        const unsigned char *section = table + i * each;
        if (strcmp((const char *)names + number(section, 4), wanted)) continue;
        const unsigned char *p = e + number(section + 0x18, 8), *end = p + number(section + 0x20, 8);
        while (p < end) {
            int has_size = p[0] == 4, attribute = p[1];
            if (has_size && attribute == 0x17) { /* EIATTR_KPARAM_INFO */
                unsigned ordinal = (unsigned)number(p + 8, 2), flags = (unsigned)number(p + 12, 4);
                f->size[ordinal] = flags >> 18 & 0x3FFF;
                if ((int)ordinal >= f->count) f->count = (int)ordinal + 1;
            }
            if (has_size && attribute == 0x10) f->threads = (int)number(p + 4, 4); /* EIATTR_REQNTID */
            p += 4 + (has_size ? number(p + 2, 2) : 0);
        }
        return 1;
    }
    return 0;
}

/* ---- modules ---- */

CUresult cuModuleLoadData(void **out, const void *image) {
    if (fails("cuModuleLoadData")) return FAILED;
    if (memcmp(image, "\177ELF", 4)) return NO_BINARY;
    module_t *m = calloc(1, sizeof *m);
    m->image = image;
    m->crc = crc32(image, elf_size(image));
    *out = m;
    return 0;
}
CUresult cuModuleUnload(void *module) {
    free(module);
    return 0;
}
CUresult cuModuleGetFunction(void **out, void *module, const char *name) {
    if (fails("cuModuleGetFunction")) return FAILED;
    function_t *f = &((module_t *)module)->function;
    f->module = module;
    snprintf(f->name, sizeof f->name, "%s", name);
    if (!read_parameters(f)) return NOT_FOUND;
    *out = f;
    return 0;
}
CUresult cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute == 8) ((function_t *)function)->dynamic = value;
    return 0;
}

/* ---- launches ---- */

static CUresult record(function_t *f, const unsigned *g, const unsigned *b, unsigned shared, void *stream, void **p) {
    if (fails("cuLaunchKernel")) return FAILED;
    if (shared > 48 * 1024 && f->dynamic < (int)shared) return INVALID_VALUE;
    if (f->threads && (unsigned)f->threads != b[0]) return INVALID_VALUE;
    pthread_once(&once, open_log);
    pthread_mutex_lock(&lock);
    fprintf(log_file, "{\"kernel\": \"%s\", \"image\": %u, \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %u, "
            "\"stream\": %lu, \"parameters\": [", f->name, f->module->crc, g[0], g[1], g[2], b[0], shared,
            (unsigned long)stream);
    for (int i = 0; i < f->count; i++) {
        fprintf(log_file, "%s\"", i ? ", " : "");
        for (unsigned j = f->size[i]; j-- > 0;) fprintf(log_file, "%02x", ((unsigned char *)p[i])[j]);
        fprintf(log_file, "\"");
    }
    fprintf(log_file, "]}\n");
    pthread_mutex_unlock(&lock);
    return 0;
}
CUresult cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **p, void **extra) {
    unsigned g[3] = {gx, gy, gz}, b[3] = {bx, by, bz};
    if (!gx || !gy || !gz || gx > 0x7FFFFFFF || gy > 65535 || gz > 65535 || extra) return INVALID_VALUE;
    return record(f, g, b, shared, stream, p);
}
typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } config_t;
CUresult cuLaunchKernelEx(const config_t *c, void *f, void **p, void **extra) {
    return extra ? INVALID_VALUE : record(f, c->grid, c->block, c->shared, c->stream, p);
}
CUresult cuMemsetD32Async(uint64_t p, unsigned value, size_t count, void *stream) {
    pthread_once(&once, open_log);
    pthread_mutex_lock(&lock);
    fprintf(log_file, "{\"memset\": %lu, \"value\": %u, \"count\": %lu, \"stream\": %lu}\n", (unsigned long)p, value,
            (unsigned long)count, (unsigned long)stream);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- what Triton's launcher asks besides ---- */

CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "stub";
    return 0;
}
CUresult cuPointerGetAttribute(void *out, int attribute, unsigned long long p) {
    (void)attribute;
    *(unsigned long long *)out = p;
    return 0;
}
CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **out, unsigned long long p) {
    (void)attributes;
    for (unsigned i = 0; i < n; i++) *(unsigned long long *)out[i] = p;
    return 0;
}
CUresult cuCtxGetCurrent(void **context) {
    *context = (void *)1;
    return 0;
}
CUresult cuCtxSetCurrent(void *context) { return (void)context, 0; }
CUresult cuCtxGetDevice(int *device) {
    *device = 0;
    return fails("cuCtxGetDevice") ? FAILED : 0;
}
CUresult cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *text = getenv("STUB_ARCH");
    int arch = text ? atoi(text) : 90;
    (void)device;
    *value = attribute == 75 ? arch / 10 : attribute == 76 ? arch % 10 : attribute == 16 ? 132 : 232448;
    return 0;
}
CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = (void *)1;
    return 0;
}
CUresult cuDevicePrimaryCtxRelease(int device) { return (void)device, 0; }
CUresult cuCtxGetLimit(size_t *value, int limit) {
    (void)limit;
    *value = 0;
    return 0;
}
CUresult cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, 0; }
CUresult cuFuncGetAttribute(int *value, int attribute, void *f) {
    (void)attribute, (void)f;
    *value = 1;
    return 0;
}
CUresult cuFuncSetCacheConfig(void *f, int config) { return (void)f, (void)config, 0; }
CUresult cuStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return 0;
}
