// A library that stands for NVIDIA's driver: it makes the system calls that libcuda.so.1 makes when CUDA starts, in the
// order of the traces named in echo_shared/cage/leeway.py, and answers 304 where libcuda does. STUB_CUDA_NEEDS names
// what it needs besides: "connect PATH", "read PATH", "fork", "nothing works".
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OS_CALL_FAILED = 304, NO_DEVICE = 100 };

static volatile pid_t handler = 0;

static void *handle_events(void *unused) {
    (void)unused;
    handler = syscall(SYS_gettid);
    pause();
    return NULL;
}

static int name_a_thread(void) {
    pthread_t thread;
    char path[64];
    if (pthread_create(&thread, NULL, handle_events, NULL)) return 0;
    while (!handler) sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/comm", handler);
    int file = open(path, O_RDWR);
    int done = file >= 0 && write(file, "cuda-EvtHandlr", 14) == 14;
    if (file >= 0) close(file);
    return done;
}

static int readable(const char *path) {
    char byte;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    int done = file >= 0 && (read(file, &byte, 1) >= 0 || errno == EISDIR);
    if (file >= 0) close(file);
    return done;
}

static int shared_memory(void) {
    int file = memfd_create("cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, 4096)) return 0;
    void *mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return mapped != MAP_FAILED && mlock(mapped, 4096) == 0 && eventfd(0, EFD_CLOEXEC) >= 0;
}

static int sequenced(void) {
    int on = 1, made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (made >= 0) setsockopt(made, SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    return made;
}

static int asked_for_mps(const char *path, int must_answer) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int made = must_answer ? socket(AF_UNIX, SOCK_STREAM, 0) : sequenced();
    strncpy(name.sun_path, path, sizeof name.sun_path - 1);
    if (made < 0) return 0;
    int connected = connect(made, (struct sockaddr *)&name, sizeof name) == 0;
    int absent = errno == ENOENT || errno == ECONNREFUSED;
    close(made);
    return connected || (absent && !must_answer);
}

static int waits_for_sharers(void) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    struct stat namespace;
    int made = sequenced();
    if (made < 0 || stat("/proc/self/ns/pid", &namespace)) return 0;
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "cuda-uvmfd-%lu-%d", namespace.st_ino, getpid());
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + 1 + length;
    return bind(made, (struct sockaddr *)&name, size) == 0 && listen(made, 16) == 0;
}

static int forks(void) {
    pid_t child = fork();
    if (child == 0) _exit(0);
    return child > 0 && waitpid(child, NULL, 0) == child;
}

static int has_what_it_needs(const char *needs) {
    if (!strncmp(needs, "connect ", 8)) return asked_for_mps(needs + 8, 1);
    if (!strncmp(needs, "read ", 5)) return readable(needs + 5);
    if (!strcmp(needs, "fork")) return forks();
    return needs[0] == 0;
}

int cuInit(unsigned flags) {
    const char *needs = getenv("STUB_CUDA_NEEDS");
    (void)flags;
    if (needs && !strcmp(needs, "nothing works")) return NO_DEVICE;
    int done = readable("/proc/self/maps") && readable("/proc/self/status") && readable("/proc/cpuinfo") &&
               readable("/sys/devices/system/cpu/online") && shared_memory() && name_a_thread() &&
               asked_for_mps("/tmp/nvidia-mps/control", 0) && waits_for_sharers() &&
               (!needs || has_what_it_needs(needs));
    return done ? 0 : OS_CALL_FAILED;
}

int cuGetErrorString(int status, const char **said) {
    *said = status == OS_CALL_FAILED ? "OS call failed or operation not supported on this OS" : "no CUDA-capable device";
    return 0;
}

int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int number) { return *device = number; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)&handler, device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void *context) { return context == NULL; }
int cuMemAlloc_v2(void **memory, size_t bytes) { return (*memory = malloc(bytes)) == NULL; }
int cuMemFree_v2(void *memory) { return free(memory), 0; }
