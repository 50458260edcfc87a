// A program that launches one kernel as `native` does, alone and twice by one call, on arrays from files: for another
// processor than this one, or under a sanitizer.
//
//     program WALK GROUPS THREADS LAUNCHES [i:NUMBER | b:FILE:OFFSET]...
//
// A file becomes memory of exactly its bytes, on the boundary of a line of the cache, and is written back at the end.
// Compiled behind host_threads.cpp, and linked with the kernel's text.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>

enum { MOST = 64 };

struct Memory {
    char path[4096];
    char* begin;
    size_t bytes;
};

static void fail(const char* what) {
    perror(what);
    exit(2);
}

static void read_whole(Memory* memory) {
    FILE* file = fopen(memory->path, "rb");
    if (!file) fail(memory->path);
    fseek(file, 0, SEEK_END);
    memory->bytes = (size_t)ftell(file);
    rewind(file);
    if (posix_memalign((void**)&memory->begin, 64, memory->bytes)) fail("memory");
    if (fread(memory->begin, 1, memory->bytes, file) != memory->bytes) fail(memory->path);
    fclose(file);
}

// A kernel's walk, in which each thread waits with its first group until every thread has one: none works alone,
// however little there is to do. What they wait for orders nothing, so that a sanitizer sees what they share.
static Walk walk_of_kernel;
static std::atomic<long> arrived;
static long awaited;
static void walk_together(const int64_t* arguments, long first, long last, long groups) {
    arrived.fetch_add(1, std::memory_order_relaxed);
    while (arrived.load(std::memory_order_relaxed) < awaited) std::this_thread::yield();
    // long enough that the next launch is not left to one thread, which would wait for ever
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(2 * ALONE_NS);
    walk_of_kernel(arguments, first, last, groups);
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

int main(int count, char** words) {
    walk_of_kernel = (Walk)dlsym(RTLD_DEFAULT, words[1]);
    if (!walk_of_kernel || count > 5 + MOST)
        return fprintf(stderr, "%s\n", walk_of_kernel ? "too many arguments" : dlerror()), 2;
    static Memory files[MOST];
    int64_t arguments[MOST];
    int known = 0;
    for (int at = 5; at < count; ++at) {
        char* offset = strrchr(words[at], ':');
        arguments[at - 5] = strtoll(offset + 1, nullptr, 10);
        if (words[at][0] == 'i') continue;
        *offset = 0;
        int file = 0;
        while (file < known && strcmp(files[file].path, words[at] + 2)) ++file;
        if (file == known) {
            strcpy(files[known++].path, words[at] + 2);
            read_whole(&files[file]);
        }
        arguments[at - 5] += (int64_t)(intptr_t)files[file].begin;
    }
    const long groups = atol(words[2]), threads = atol(words[3]);
    awaited = groups < threads ? groups : threads;
    for (long launch = 0; launch < atol(words[4]); ++launch) {
        arrived.store(0);
        ksgen_launch(walk_together, arguments, groups, 0, threads, nullptr);
    }
    arrived.store(0);
    // the second writes where the first one wrote
    const Step in_turn[] = {{walk_together, 0, groups}, {walk_of_kernel, 0, groups}};
    const Recorded recorded = {nullptr, in_turn, 2, arguments, count - 5, nullptr, 0};
    const Repeat repeat = {&recorded, threads};
    ksgen_launch_all(&repeat);
    for (int file = 0; file < known; ++file) {
        FILE* to = fopen(files[file].path, "wb");
        if (!to || fwrite(files[file].begin, 1, files[file].bytes, to) != files[file].bytes || fclose(to))
            fail(files[file].path);
        free(files[file].begin);
    }
    fflush(nullptr);
    _Exit(0);  // the crew's threads wait for ever
}
