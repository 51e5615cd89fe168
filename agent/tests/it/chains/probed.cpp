// Two libraries in one source, which the agent hooks by their names: a driver whose allocation does
// nothing, and a runtime whose cudaSetDevice calls back into the program, with its return probe
// pending meanwhile.
#include <cstddef>
#ifdef DRIVER
extern "C" int cuMemAlloc_v2(void** address, size_t) {
    static char* next = reinterpret_cast<char*>(0x7e0000000000);
    *address = next += 2 << 20;
    return 0;
}
#else
static void (*to_call)();
extern "C" void call_back(void (*function)()) { to_call = function; }
extern "C" int cudaSetDevice(int device) {
    if (to_call) to_call();
    return device;
}
#endif
