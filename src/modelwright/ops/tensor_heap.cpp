// PyTorch's allocator on the CPU, with a heap of its own for larger tensors.
//
// In the C library's heap small objects that stay pin down the pages between large blocks that are gone, and every
// aligned block cuts two remainders off; resident memory then grows to several times what is alive. Here blocks of at
// least `least_bytes` share one range of addresses with nothing else: the smallest free range that fits is taken, the
// lowest of equal ones, and free neighbors are merged. Freed pages stay in the process until `heap_give_back`, so that
// a step finds them without a page fault. Everything else goes to PyTorch's own allocator. The reference is `NaiveHeap`
// in the tests.
//
// All functions may be called by any thread, and in a forked child.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

using Address = uintptr_t;

constexpr size_t kAlignment = 64;            // what PyTorch's own allocator guarantees
constexpr size_t kGrowBytes = size_t{2} << 20;  // untouched pages cost nothing, system calls do
// An address far from the program, its heap and its libraries, so that the heap can grow in one piece; only a wish.
constexpr Address kFirstAddress = 0x2000'0000'0000;

size_t rounded_up(size_t number, size_t unit) { return (number + unit - 1) / unit * unit; }

size_t page_bytes() {
  static const size_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

void free_block(void* block);

class TensorHeap final : public c10::Allocator {
 public:
  TensorHeap(c10::Allocator* usual, size_t least_bytes)
      : usual_(usual), usual_free_(usual->raw_deleter()), least_bytes_(least_bytes) {}

  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = num_bytes < least_bytes_ ? nullptr : take(num_bytes);
    if (block != nullptr) {
      c10::profiledCPUMemoryReporter().New(block, num_bytes);
    } else {
      block = usual_->raw_allocate(num_bytes);  // throws when there is no memory
    }
    return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  void free(void* block) {
    if (!put_back(reinterpret_cast<Address>(block))) usual_free_(block);
  }

  int give_back() {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& [start, size] : free_) {
      Address first = rounded_up(start, page_bytes()), last = (start + size) / page_bytes() * page_bytes();
      if (first < last && madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED)) return errno;
    }
    return 0;
  }

  void figures(int64_t* to) {
    std::lock_guard<std::mutex> guard(mutex_);
    to[0] = living_bytes_;
    to[1] = peak_bytes_;
    to[2] = mapped_bytes_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_bytes_ = living_bytes_;
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void* take(size_t num_bytes) {
    if (num_bytes > SIZE_MAX / 2) return nullptr;
    size_t size = rounded_up(num_bytes, kAlignment);
    std::lock_guard<std::mutex> guard(mutex_);
    auto best = by_size_.lower_bound({size, 0});
    if (best == by_size_.end()) {
      if (!grow(size)) return nullptr;
      best = by_size_.lower_bound({size, 0});
    }
    auto [whole, start] = *best;
    remove_free(free_.find(start));
    if (whole > size) add_free(start + size, whole - size);
    living_[start] = size;
    living_bytes_ += size;
    peak_bytes_ = std::max(peak_bytes_, living_bytes_);
    return reinterpret_cast<void*>(start);
  }

  bool put_back(Address start) {
    // most blocks that are not from here lie outside, which costs no lock
    if (start < low_.load(std::memory_order_acquire) || start >= high_.load(std::memory_order_acquire)) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = living_.find(start);
    if (found == living_.end()) return false;
    size_t size = found->second;
    living_.erase(found);
    living_bytes_ -= size;
    c10::profiledCPUMemoryReporter().Delete(reinterpret_cast<void*>(start));
    add_merged(start, size);
    return true;
  }

  // Maps what the last free range lacks, if that reaches the end, so that a heap in one piece has no gap there.
  bool grow(size_t size) {
    size_t tail = 0;
    auto last = free_.lower_bound(end_);
    if (last != free_.begin() && std::prev(last)->first + std::prev(last)->second == end_) tail = std::prev(last)->second;
    size_t missing = rounded_up(size - tail, kGrowBytes);
    Address start = map(end_ ? end_ : kFirstAddress, missing);
    if (start != end_ && tail) {  // somewhere else after all: the tail does not help
      if (start) munmap(reinterpret_cast<void*>(start), missing);
      start = map(0, missing = rounded_up(size, kGrowBytes));
    }
    if (!start) return false;
    mapped_bytes_ += missing;
    if (!low_ || start < low_) low_ = start;
    if (start + missing > high_) high_ = start + missing;
    bool continues = start == end_;
    end_ = start + missing;
    continues ? add_merged(start, missing) : add_free(start, missing);
    return true;
  }

  static Address map(Address wish, size_t num_bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* made = mmap(reinterpret_cast<void*>(wish), num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return made == MAP_FAILED ? 0 : reinterpret_cast<Address>(made);
  }

  void add_merged(Address start, size_t size) {
    auto next = free_.lower_bound(start);
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == start) {
        start = before->first;
        size += before->second;
        remove_free(before);
      }
    }
    if (next != free_.end() && start + size == next->first) {
      size += next->second;
      remove_free(next);
    }
    add_free(start, size);
  }

  void add_free(Address start, size_t size) {
    free_[start] = size;
    by_size_.insert({size, start});
  }

  void remove_free(std::map<Address, size_t>::iterator one) {
    by_size_.erase({one->second, one->first});
    free_.erase(one);
  }

  c10::Allocator* const usual_;
  const c10::DeleterFnPtr usual_free_;
  const size_t least_bytes_;
  std::atomic<Address> low_{0}, high_{0};
  std::mutex mutex_;  // for all that follows
  Address end_ = 0;   // of what was mapped last
  std::map<Address, size_t> free_;
  std::set<std::pair<size_t, Address>> by_size_;
  std::unordered_map<Address, size_t> living_;
  int64_t living_bytes_ = 0, peak_bytes_ = 0, mapped_bytes_ = 0;
};

TensorHeap* heap = nullptr;  // never destroyed: tensors may outlive everything else

void free_block(void* block) { heap->free(block); }

}  // namespace

extern "C" {

// Called once, before another thread makes tensors. Returns 0 or an errno.
int heap_install(int64_t least_bytes) {
  if (heap != nullptr) return 0;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return EBUSY;
  heap = new TensorHeap(c10::GetDefaultCPUAllocator(), least_bytes);
  // a fork in the middle of another thread's allocation would leave the child a lock that nobody opens
  pthread_atfork([] { heap->lock(); }, [] { heap->unlock(); }, [] { heap->unlock(); });
  c10::SetCPUAllocator(heap, 1);
  return c10::GetCPUAllocator() == heap ? 0 : EPERM;
}

int heap_give_back() { return heap->give_back(); }
void heap_figures(int64_t* to) { heap->figures(to); }
void heap_reset_peak() { heap->reset_peak(); }
}
