// A program of many ways to call, which writes of each allocation through what functions of its own
// it came: a line `BYTES innermost;...;outermost`. Compiled with -O2 and without frame pointers.
//
//   chain all THREADS      every way, in the main thread and in others
//   chain deep FRAMES      a recursion that takes some 1,100 bytes of stack each time
//   chain outer            an allocation inside another probed function
#include <alloca.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#define KEPT __attribute__((noinline))

// What the program itself says it is in.
static thread_local std::vector<const char*> within;
struct In {
    explicit In(const char* name) { within.push_back(name); }
    ~In() { within.pop_back(); }
};

static int (*allocate)(void**, size_t);
static int (*set_device)(int);
static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;
// Keeps calls from becoming jumps: something is left to do after each.
static volatile long left_to_do;

static void* symbol(const char* library, const char* name) {
    void* handle = dlopen(library, RTLD_NOW);
    void* found = handle ? dlsym(handle, name) : nullptr;
    if (!found) {
        fprintf(stderr, "no %s: %s\n", name, dlerror());
        exit(3);
    }
    return found;
}

KEPT long leaf(long bytes) {
    In in("leaf");
    void* address = nullptr;
    int result = allocate(&address, bytes);
    pthread_mutex_lock(&output);
    printf("%ld ", bytes);
    for (size_t i = within.size(); i-- > 0;) printf("%s%s", within[i], i ? ";" : "\n");
    fflush(stdout);
    pthread_mutex_unlock(&output);
    return result + left_to_do;
}

struct Way {
    virtual long go(long bytes) = 0;
    virtual ~Way() = default;
};
struct Virtual final : Way {
    KEPT long go(long bytes) override {
        In in("Virtual::go");
        return leaf(bytes) + left_to_do;
    }
};
KEPT long by_virtual(Way* way, long bytes) {
    In in("by_virtual");
    return way->go(bytes) * 3 + left_to_do;
}
KEPT long by_alloca(long bytes) {
    In in("by_alloca");
    size_t room = 48 + (bytes & 127);
    char* piece = static_cast<char*>(alloca(room));
    memset(piece, 1, room);
    Virtual way;
    return by_virtual(&way, bytes) + piece[room / 2] + left_to_do;
}
KEPT long by_aligned(long bytes) {
    In in("by_aligned");
    alignas(64) volatile char piece[192];
    piece[bytes & 127] = 1;
    return by_alloca(bytes) + piece[3] + left_to_do;
}
KEPT long by_function(const std::function<long(long)>& next, long bytes) {
    In in("by_function");
    return next(bytes) + left_to_do;
}
KEPT long by_catch(long bytes) {
    In in("by_catch");
    try {
        if (bytes < 0) throw std::runtime_error("none");
        return by_function([](long b) { return by_aligned(b) + left_to_do; }, bytes) + left_to_do;
    } catch (const std::exception&) {
        return -1;
    }
}
// The C library calls back; its own frames are not the program's to name.
static thread_local long asked, answered;
KEPT int compare(const void* a, const void* b) {
    In in("compare");
    if (asked) {
        long bytes = asked;
        asked = 0;
        answered = by_catch(bytes);
    }
    return *static_cast<const int*>(a) - *static_cast<const int*>(b) + left_to_do;
}
KEPT long by_qsort(long bytes) {
    In in("by_qsort");
    int numbers[3] = {3, 1, 2};
    asked = bytes;
    qsort(numbers, 3, sizeof(int), compare);
    return answered + numbers[0] + left_to_do;
}
template <int N>
struct Step {
    static KEPT long down(long a, long b) {
        In in(N % 2 ? "Step<odd>::down" : "Step<even>::down");
        volatile long pad[N % 5 + 1];
        pad[0] = a;
        long below = Step<N - 1>::down(a, b + 1) * (b | 1);
        return below + pad[0] + left_to_do;
    }
};
template <>
struct Step<0> {
    static KEPT long down(long a, long) {
        In in("Step<even>::down");
        return by_qsort(a) + left_to_do;
    }
};
KEPT long deep(long frames, long bytes) {
    In in("deep");
    volatile char piece[1024];
    piece[frames & 1023] = 1;
    long below = frames > 1 ? deep(frames - 1, bytes) : leaf(bytes);
    return below + piece[frames & 1023] + left_to_do;
}

KEPT void* in_thread(void* number) {
    In in("in_thread");
    long bytes = 1000000 + 4096 * reinterpret_cast<long>(number);
    for (int i = 0; i < 3; i++) left_to_do = Step<20>::down(bytes, 1) & 0;
    return nullptr;
}

static long outer_bytes;
extern "C" KEPT void called_back() {
    In in("called_back");
    left_to_do = leaf(outer_bytes) & 0;
}
KEPT long by_outer(long bytes) {
    In in("by_outer");
    outer_bytes = bytes;
    return set_device(0) + left_to_do;
}

int main(int count, char** words) {
    In in("main");
    const char* what = count > 1 ? words[1] : "all";
    long number = count > 2 ? atol(words[2]) : 1;
    bool is_outer = !strcmp(what, "outer");
    allocate = reinterpret_cast<int (*)(void**, size_t)>(
        is_outer ? symbol("libcuda.so.1", "cuMemAlloc_v2") : symbol("libcudart.so.13", "cudaMalloc"));
    if (is_outer) {
        set_device = reinterpret_cast<int (*)(int)>(symbol("libcudart.so.13", "cudaSetDevice"));
        auto call_back = reinterpret_cast<void (*)(void (*)())>(symbol("libcudart.so.13", "call_back"));
        call_back(called_back);
        for (int i = 0; i < 3; i++) left_to_do = by_outer(700000) & 0;
    } else if (!strcmp(what, "deep")) {
        left_to_do = deep(number, 900000) & 0;
    } else {
        for (int i = 0; i < 3; i++) left_to_do = Step<20>::down(800000, 1) & 0;
        std::vector<pthread_t> threads(number);
        for (long i = 0; i < number; i++)
            pthread_create(&threads[i], nullptr, in_thread, reinterpret_cast<void*>(i));
        for (auto thread : threads) pthread_join(thread, nullptr);
    }
    // Whoever traces has to read where the code lies, on however busy a machine.
    sleep(2);
    return 0;
}
