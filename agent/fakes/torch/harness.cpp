// Exercises the real caching allocator of PyTorch (libc10_cuda.so), without the rest of PyTorch, and
// says at each checkpoint what the allocator itself knows: its statistics and its snapshot.
//
//   harness FOLDER
//
// A checkpoint writes FOLDER/NAME.json, marks its place among the calls by a pinned buffer of a size
// of its own (4096 * (1000 + number) bytes), prints "checkpoint NAME", and waits for a line on
// standard input: the counters stay as they are while someone compares. After the last it prints
// "done". script.py does the same with the whole of PyTorch; the files have one form.
//
// Only with device memory that costs nothing (the stand-ins): it fills the card.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

// Exported for the rest of PyTorch, which says here whether a device is in use, and in no header.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(c10::DeviceIndex));
}

namespace allocator = c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::cuda::CUDAStream;

namespace {

constexpr size_t KIB = 1024;
constexpr size_t MIB = 1024 * KIB;
constexpr size_t GIB = 1024 * MIB;

std::string folder;
int checkpoints = 0;

// What was seen right after a request failed.
struct Failure {
  size_t tried;
  int64_t allocated;
  int64_t reserved;
  int64_t retries;
  int64_t ooms;
  size_t device_free;
};
std::vector<Failure> failures;

// c10's id of each stream in use, by the handle that snapshots name it with.
std::map<uintptr_t, int64_t> streams = {{0, 0}};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "harness: %s\n", what.c_str());
  std::exit(1);
}

void must(cudaError_t code, const char* call) {
  if (code != cudaSuccess) {
    fail(std::string(call) + " returned " + std::to_string(static_cast<int>(code)));
  }
}

CUDAStream new_stream() {
  CUDAStream stream = c10::cuda::getStreamFromPool();
  streams[reinterpret_cast<uintptr_t>(stream.stream())] = stream.id();
  return stream;
}

// The figure over all pools, as torch.cuda.memory_stats() has it under "all".
void write_stat(FILE* out, const char* name, const c10::CachingAllocator::StatArray& stats) {
  const auto& all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  std::fprintf(
      out,
      "\"%s\":{\"current\":%" PRId64 ",\"peak\":%" PRId64 ",\"allocated\":%" PRId64
      ",\"freed\":%" PRId64 "},",
      name,
      all.current,
      all.peak,
      all.allocated,
      all.freed);
}

void write_stats(FILE* out, c10::DeviceIndex device) {
  const auto stats = allocator::getDeviceStats(device);
  std::fprintf(out, "{\"device\":%d,", device);
  write_stat(out, "allocation", stats.allocation);
  write_stat(out, "segment", stats.segment);
  write_stat(out, "active", stats.active);
  write_stat(out, "inactive_split", stats.inactive_split);
  write_stat(out, "allocated_bytes", stats.allocated_bytes);
  write_stat(out, "reserved_bytes", stats.reserved_bytes);
  write_stat(out, "active_bytes", stats.active_bytes);
  write_stat(out, "inactive_split_bytes", stats.inactive_split_bytes);
  write_stat(out, "requested_bytes", stats.requested_bytes);
  std::fprintf(
      out,
      "\"num_alloc_retries\":%" PRId64 ",\"num_ooms\":%" PRId64 ",\"num_device_alloc\":%" PRId64
      ",\"num_device_free\":%" PRId64 "}",
      stats.num_alloc_retries,
      stats.num_ooms,
      stats.num_device_alloc,
      stats.num_device_free);
}

void write_segment(FILE* out, const allocator::SegmentInfo& segment) {
  const auto handle = reinterpret_cast<uintptr_t>(segment.stream);
  const auto known = streams.find(handle);
  if (known == streams.end()) {
    fail("a segment is of a stream that was never asked for");
  }
  std::fprintf(
      out,
      "{\"device\":%d,\"address\":%zu,\"bytes\":%zu,\"allocated_bytes\":%zu,\"active_bytes\":%zu,"
      "\"requested_bytes\":%zu,\"stream\":%" PRId64 ",\"type\":\"%s\",\"expandable\":%s,"
      "\"pool\":[%llu,%llu],\"blocks\":[",
      segment.device,
      segment.address,
      segment.total_size,
      segment.allocated_size,
      segment.active_size,
      segment.requested_size,
      known->second,
      segment.is_large ? "large" : "small",
      segment.is_expandable ? "true" : "false",
      segment.owner_private_pool_id.first,
      segment.owner_private_pool_id.second);
  size_t address = segment.address;
  const char* comma = "";
  for (const auto& block : segment.blocks) {
    // As torch.cuda.memory_snapshot() names them.
    const char* state = block.allocated ? "active_allocated"
        : block.active                  ? "active_pending_free"
                                        : "inactive";
    std::fprintf(
        out,
        "%s{\"address\":%zu,\"bytes\":%zu,\"requested_bytes\":%zu,\"state\":\"%s\"}",
        comma,
        address,
        block.size,
        block.requested_size,
        state);
    address += block.size;
    comma = ",";
  }
  std::fprintf(out, "]}");
}

void checkpoint(const std::string& name) {
  const int number = checkpoints++;
  const std::string path = folder + "/" + name + ".json";
  FILE* out = std::fopen(path.c_str(), "w");
  if (out == nullptr) {
    fail("failed to write " + path);
  }
  const size_t mark = 4096 * static_cast<size_t>(1000 + number);
  std::fprintf(out, "{\"name\":\"%s\",\"mark_bytes\":%zu,\"devices\":[", name.c_str(), mark);
  for (int device = 0; device < c10::cuda::device_count(); device++) {
    std::fprintf(out, "%s", device == 0 ? "" : ",");
    write_stats(out, static_cast<c10::DeviceIndex>(device));
  }
  std::fprintf(out, "],\"segments\":[");
  const char* comma = "";
  for (const auto& segment : allocator::snapshot().segments) {
    std::fprintf(out, "%s", comma);
    write_segment(out, segment);
    comma = ",";
  }
  std::fprintf(out, "],\"failures\":[");
  comma = "";
  for (const auto& failure : failures) {
    std::fprintf(
        out,
        "%s{\"tried_bytes\":%zu,\"allocated_bytes\":%" PRId64 ",\"reserved_bytes\":%" PRId64
        ",\"retries\":%" PRId64 ",\"ooms\":%" PRId64 ",\"device_free_bytes\":%zu}",
        comma,
        failure.tried,
        failure.allocated,
        failure.reserved,
        failure.retries,
        failure.ooms,
        failure.device_free);
    comma = ",";
  }
  std::fprintf(out, "]}\n");
  if (std::fclose(out) != 0) {
    fail("failed to write " + path);
  }
  void* buffer = nullptr;
  must(cudaHostAlloc(&buffer, mark, 0), "cudaHostAlloc");
  must(cudaFreeHost(buffer), "cudaFreeHost");
  std::printf("checkpoint %s\n", name.c_str());
  std::fflush(stdout);
  if (std::getchar() == EOF) {
    fail("nobody waits at checkpoint " + name);
  }
}

// Numbers that are the same in every run.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state(seed) {}
  uint64_t below(uint64_t limit) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (state >> 33) % limit;
  }

 private:
  uint64_t state;
};

// Requests of every class of the allocator: small, 1 to 10 MiB, large, huge.
size_t some_size(Numbers& numbers) {
  switch (numbers.below(8)) {
    case 0:
    case 1:
    case 2:
      return 1 + numbers.below(64 * KIB);
    case 3:
    case 4:
      return 1 + numbers.below(MIB);
    case 5:
      return MIB + 1 + numbers.below(9 * MIB);
    case 6:
      return 10 * MIB + numbers.below(40 * MIB);
    default:
      return 100 * MIB + numbers.below(100 * MIB);
  }
}

int64_t all(const c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

// Of device 0.
bool runs_out(size_t bytes) {
  try {
    DataPtr block = allocator::get()->allocate(bytes);
  } catch (const c10::OutOfMemoryError&) {
    const auto stats = allocator::getDeviceStats(0);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    must(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    failures.push_back(
        {bytes,
         all(stats.allocated_bytes),
         all(stats.reserved_bytes),
         stats.num_alloc_retries,
         stats.num_ooms,
         free_bytes});
    return true;
  }
  return false;
}

std::vector<DataPtr> every_size() {
  const size_t sizes[] = {
      1,          100,           511,           512,       513,          4096,
      100'000,    512 * KIB,     MIB - 1,       MIB,       MIB + 1,      3 * MIB,
      5 * MIB,    7 * MIB + 100, 10 * MIB - 1,  10 * MIB,  10 * MIB + 1, 21 * MIB,
      64 * MIB,   99 * MIB + 7,  200 * MIB + 1, 512 * MIB, GIB + 12345,  777,
      1536 * KIB, 2 * MIB,       2 * MIB + 1,   20 * MIB,
  };
  std::vector<DataPtr> blocks;
  for (const size_t bytes : sizes) {
    blocks.push_back(allocator::get()->allocate(bytes));
  }
  return blocks;
}

// Allocates and frees at random, so that blocks are split, joined and found again.
void churn(std::vector<DataPtr>& kept, uint64_t seed, int rounds, size_t most) {
  Numbers numbers(seed);
  for (int round = 0; round < rounds; round++) {
    if (!kept.empty() && (kept.size() > most || numbers.below(3) == 0)) {
      const size_t victim = numbers.below(kept.size());
      std::swap(kept[victim], kept.back());
      kept.pop_back();
    } else {
      kept.push_back(allocator::get()->allocate(some_size(numbers)));
    }
  }
}

void run() {
  // What the rest of PyTorch does at its start. Every device that is asked about is in use.
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(c10::cuda::device_count());
  allocator::init(c10::cuda::device_count());
  checkpoint("start");

  std::vector<DataPtr> blocks = every_size();
  checkpoint("sizes");

  // In mixed order: every third from the front, every second from the back, the middle stays.
  for (size_t index = 0; index < blocks.size(); index += 3) {
    blocks[index].clear();
  }
  for (size_t index = blocks.size(); index > 16; index -= 2) {
    blocks[index - 1].clear();
  }
  checkpoint("frees");

  std::vector<DataPtr> of_streams;
  std::vector<CUDAStream> used;
  for (int turn = 0; turn < 3; turn++) {
    used.push_back(new_stream());
    c10::cuda::CUDAStreamGuard guard(used.back());
    for (const size_t bytes : {700 * KIB, 300 * KIB, 6 * MIB, 30 * MIB, 90 * MIB}) {
      of_streams.push_back(allocator::get()->allocate(bytes + static_cast<size_t>(turn)));
    }
  }
  // Blocks go back to their own stream, whichever is current.
  for (size_t index = 1; index < of_streams.size(); index += 2) {
    of_streams[index].clear();
  }
  checkpoint("streams");

  std::vector<DataPtr> kept;
  churn(kept, 1, 3000, 24);
  {
    c10::cuda::CUDAStreamGuard guard(used[0]);
    churn(kept, 2, 500, 24);
  }
  checkpoint("churn");

  allocator::emptyCache();
  checkpoint("empty-cache");

  // One card after the other.
  std::vector<DataPtr> elsewhere;
  {
    c10::cuda::CUDAGuard guard(1);
    elsewhere.push_back(allocator::get()->allocate(12 * MIB));
    elsewhere.push_back(allocator::get()->allocate(300));
    elsewhere.push_back(allocator::get()->allocate(12 * MIB));
    elsewhere[0].clear();
  }
  checkpoint("second-device");

  std::vector<std::vector<DataPtr>> of_threads(4);
  std::vector<std::thread> threads;
  for (size_t index = 0; index < of_threads.size(); index++) {
    threads.emplace_back([&of_threads, index] { churn(of_threads[index], 10 + index, 800, 5); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  checkpoint("threads");

  of_threads.clear();
  kept.clear();
  of_streams.clear();
  blocks.clear();
  allocator::emptyCache();
  checkpoint("all-freed");

  // What is cached has to be given back before a larger request fits.
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  must(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  const size_t part = free_bytes / 8 / (2 * MIB) * (2 * MIB);
  {
    DataPtr small = allocator::get()->allocate(1000);
    std::vector<DataPtr> parts;
    for (int turn = 0; turn < 6; turn++) {
      parts.push_back(allocator::get()->allocate(part));
    }
    parts.clear();
    blocks.push_back(std::move(small));
  }
  {
    // Another stream's cached blocks do not serve.
    c10::cuda::CUDAStreamGuard guard(used[1]);
    blocks.push_back(allocator::get()->allocate(4 * part));
  }
  checkpoint("retry");

  // More than the card has, and more than is left of it.
  if (!runs_out(total_bytes + 2 * MIB) || !runs_out(5 * part)) {
    fail("a request that cannot be met was met");
  }
  blocks.push_back(allocator::get()->allocate(5 * MIB));
  if (!runs_out(size_t(1) << 40)) {
    fail("a request that cannot be met was met");
  }
  checkpoint("oom");

  // The program's own limit.
  blocks.clear();
  allocator::emptyCache();
  allocator::setMemoryFraction(0.25, 0);
  blocks.push_back(allocator::get()->allocate(part));
  if (!runs_out(2 * part)) {
    fail("a request beyond the limit was met");
  }
  allocator::setMemoryFraction(1.0, 0);
  checkpoint("limit");

  // A block that another stream may still use is free for the program, and not for the allocator
  // until it looks at that stream again.
  {
    DataPtr first = allocator::get()->allocate(25 * MIB);
    DataPtr second = allocator::get()->allocate(200 * KIB);
    allocator::recordStream(first, used[2]);
    allocator::recordStream(second, used[2]);
  }
  checkpoint("pending");
  blocks.push_back(allocator::get()->allocate(3 * KIB));
  checkpoint("pending-over");

  // A pool of its own, as for graphs and torch.cuda.MemPool: its blocks serve no other request.
  const c10::MempoolId_t pool = {0, 1};
  std::vector<DataPtr> pooled;
  allocator::beginAllocateToPool(0, pool, [](cudaStream_t) { return true; });
  for (const size_t bytes : {90 * KIB, 3 * MIB, 40 * MIB}) {
    pooled.push_back(allocator::get()->allocate(bytes));
  }
  pooled[1].clear();
  allocator::endAllocateToPool(0, pool);
  pooled.push_back(allocator::get()->allocate(3 * MIB));
  checkpoint("private-pool");
  pooled.clear();
  allocator::releasePool(0, pool);

  // Blocks that are asked for by address alone have no stream and no requested size in the probes.
  void* raw = allocator::raw_alloc(11 * MIB + 5);
  void* small = allocator::raw_alloc(1111);
  void* other = allocator::raw_alloc_with_stream(50 * MIB, used[0].stream());
  checkpoint("raw");
  allocator::raw_delete(small);
  allocator::raw_delete(raw);
  allocator::raw_delete(other);
  checkpoint("raw-freed");

  blocks.clear();
  elsewhere.clear();
  allocator::emptyCache();
  checkpoint("end");
}

} // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: harness FOLDER\n");
    return 2;
  }
  folder = arguments[1];
  try {
    run();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  std::printf("done\n");
  return 0;
}
