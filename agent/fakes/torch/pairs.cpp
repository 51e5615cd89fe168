// Pairs of an allocation and a free through the real caching allocator of PyTorch, for whoever
// measures what they cost: `cargo xtask bench framework`.
//
//   pairs
//
// Prints "ready". Then, for each line with a number, makes so many pairs of the same size, which the
// allocator serves from its cache, and prints the nanoseconds that one took.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

// Exported for the rest of PyTorch, which says here whether a device is in use, and in no header.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(c10::DeviceIndex));
}

namespace allocator = c10::cuda::CUDACachingAllocator;

int main() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(c10::cuda::device_count());
  allocator::init(c10::cuda::device_count());
  c10::Allocator* cache = allocator::get();
  // The first takes a segment from the driver.
  cache->allocate(4096).clear();
  std::printf("ready\n");
  std::fflush(stdout);
  char line[64];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    const long count = std::atol(line);
    const auto began = std::chrono::steady_clock::now();
    for (long pair = 0; pair < count; pair++) {
      c10::DataPtr block = cache->allocate(4096);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    std::printf("%.1f\n", count > 0 ? took.count() / static_cast<double>(count) : 0.0);
    std::fflush(stdout);
  }
  return 0;
}
