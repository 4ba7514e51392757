// PyTorch's allocator on the CPU, with one arena for the tensors of a training step.
//
// Between `arena_begin` and `arena_end` the larger allocations of the thread that called them are either recorded (and
// mapped one by one, so that recording leaves no gaps in the heap), or replayed: put where a plan says. All other
// allocations go to PyTorch's own allocator. A place is given out only when nothing that is alive overlaps it, so a
// plan that does not fit the step costs misses, never memory that two tensors share. The reference is `ReplayNaive` in the tests.
//
// Functions return 0 or an errno. They are called by the thread that trains; frees may come from any thread.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

enum Mode : int64_t { kPassThrough = 0, kRecord = 1, kReplay = 2 };

constexpr int64_t kOutlives = -1;  // the offset of a block that was not freed by the end of its step
constexpr int64_t kWindow = 64;    // how far back a block of equal size is looked for, in blocks that do not vary,
constexpr int64_t kNear = 4;       // and how far one that varies
constexpr int64_t kSkip = 2;       // how many bytes of the plan may be passed over for one that has come without a place

struct Recorded {
  int64_t num_bytes, birth, death;
};

struct Planned {
  int64_t num_bytes, offset;
  bool varies;       // from step to step: the place is for blocks of half its bytes to all of them
  int64_t position;  // how many blocks that do not vary come before it,
  int64_t before;    // and their bytes
  bool is_taken = false;
};

struct Mapping {
  size_t mapped_bytes;
  int64_t number;  // of the allocation in its step
  uint64_t step;
};

struct Arena {
  char* base;
  size_t size;
  std::map<int64_t, int64_t> living;  // offset -> end

  bool holds(const void* block) const { return base <= block && block < base + size; }

  bool is_free(int64_t start, int64_t end) const {
    auto next = living.lower_bound(start);
    if (next != living.end() && next->first < end) return false;
    return next == living.begin() || std::prev(next)->second <= start;
  }
};

struct Figures {
  int64_t num_served, served_bytes, num_missed, missed_bytes, num_outliving, outliving_bytes, peak_bytes;
};

size_t page_bytes() {
  static const size_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

size_t whole_pages(size_t num_bytes) { return (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

void* map_pages(size_t num_bytes) {
  void* found = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

thread_local bool is_in_step = false;

void free_block(void* block);

class StepAllocator final : public c10::Allocator {
 public:
  explicit StepAllocator(c10::Allocator* usual) : usual_(usual), usual_free_(usual->raw_deleter()) {}

  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = nullptr;
    if (is_in_step && static_cast<int64_t>(num_bytes) >= least_bytes_) {
      block = mode_ == kRecord ? record(num_bytes) : replay(num_bytes);
    }
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
    if (!free_in_arena(block) && !free_mapping(block)) usual_free_(block);
  }

  void begin(int64_t mode, int64_t least_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    mode_ = mode;
    least_bytes_ = least_bytes;
    ++step_;
    time_ = cursor_ = passed_bytes_ = refused_bytes_ = 0;
    recorded_.clear();
    for (auto& one : planned_) one.is_taken = false;
    figures_ = Figures{};
    figures_.peak_bytes = living_bytes_;
    is_in_step = mode != kPassThrough;
  }

  void end() {
    std::lock_guard<std::mutex> guard(mutex_);
    is_in_step = false;
    ++step_;  // what dies from now on has outlived its step
  }

  int plan(int64_t number, const int64_t* bytes, const int64_t* offsets, const int64_t* varies, int64_t arena_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    retire();
    size_t size = whole_pages(std::max<int64_t>(arena_bytes, 1));
    auto* base = static_cast<char*>(map_pages(size));
    if (base == nullptr) return errno;
    arenas_.push_back(std::make_unique<Arena>(Arena{base, size, {}}));
    current_ = arenas_.back().get();
    cover();
    for (int64_t i = 0, position = 0, before = 0; i < number; ++i) {
      planned_.push_back({bytes[i], offsets[i], varies[i] != 0, position, before});
      position += !varies[i];
      before += varies[i] ? 0 : bytes[i];
      (varies[i] ? varying_ : by_size_[bytes[i]]).push_back(i);
    }
    return 0;
  }

  void drop() {
    std::lock_guard<std::mutex> guard(mutex_);
    retire();
  }

  int give_back() {  // the pages of the arena that nothing lives on
    std::lock_guard<std::mutex> guard(mutex_);
    if (current_ == nullptr) return 0;
    size_t start = 0;
    for (const auto& [offset, end] : current_->living) {
      if (int failed = discard(start, offset)) return failed;
      start = whole_pages(end);
    }
    return discard(start, current_->size);
  }

  int64_t num_recorded() {
    std::lock_guard<std::mutex> guard(mutex_);
    return recorded_.size();
  }

  void copy_recorded(int64_t* to) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& one : recorded_) {
      *to++ = one.num_bytes;
      *to++ = one.birth;
      *to++ = one.death;
    }
  }

  int64_t time() const { return time_; }
  Figures figures() {
    std::lock_guard<std::mutex> guard(mutex_);
    return figures_;
  }
  int64_t living_bytes() {
    std::lock_guard<std::mutex> guard(mutex_);
    return living_bytes_;
  }

 private:
  void* record(size_t num_bytes) {
    size_t mapped_bytes = whole_pages(num_bytes);
    void* block = map_pages(mapped_bytes);
    if (block == nullptr) return nullptr;
    std::lock_guard<std::mutex> guard(mutex_);
    mappings_[block] = {mapped_bytes, static_cast<int64_t>(recorded_.size()), step_};
    num_mappings_ = mappings_.size();
    recorded_.push_back({static_cast<int64_t>(num_bytes), time_++, kOutlives});
    return block;
  }

  // Steps need not be alike. Sizes that come equally often in steps say where in the plan a step stands: each takes the
  // next planned block of its size, unless more of the plan would be passed over than has come without a place; else
  // one that was passed over. What varies in number or size (attention tiles of packed rows, say) is planned with some
  // room; it takes a block of that kind nearby which fits and is free, and moves nothing else.
  void* replay(size_t num_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto size = static_cast<int64_t>(num_bytes);
    int64_t number = following(size);
    if (number >= 0) {
      cursor_ = planned_[number].position + 1;
      passed_bytes_ = planned_[number].before + size;
      refused_bytes_ = 0;
    } else if ((number = passed_over(size)) < 0) {
      number = of_those_that_vary(size);
    }
    if (number >= 0) {
      planned_[number].is_taken = true;
      int64_t start = planned_[number].offset;
      if (start == kOutlives) {
        ++figures_.num_outliving;
        figures_.outliving_bytes += size;
        return nullptr;
      }
      if (current_->is_free(start, start + size)) {
        current_->living[start] = start + size;
        ++figures_.num_served;
        figures_.served_bytes += size;
        living_bytes_ += size;
        figures_.peak_bytes = std::max(figures_.peak_bytes, living_bytes_);
        return current_->base + start;
      }
    }
    ++figures_.num_missed;
    figures_.missed_bytes += size;
    return nullptr;
  }

  auto from(const std::vector<int64_t>& numbers, int64_t position) const {
    return std::lower_bound(numbers.begin(), numbers.end(), position,
                            [this](int64_t number, int64_t least) { return planned_[number].position < least; });
  }

  // The next block of that size which does not vary, or -1: also where it lies so far off that the plan has more bytes
  // in between than have come without a place. So what comes too often does not carry the step away.
  int64_t following(int64_t size) {
    auto found = by_size_.find(size);
    if (found == by_size_.end()) return -1;
    auto next = from(found->second, cursor_);
    if (next != found->second.end() && planned_[*next].before - passed_bytes_ <= kSkip * (refused_bytes_ + size)) {
      return *next;
    }
    refused_bytes_ += size;
    return -1;
  }

  // The last block of that size which does not vary, has been passed over and is not taken yet, or -1.
  int64_t passed_over(int64_t size) const {
    auto found = by_size_.find(size);
    if (found == by_size_.end()) return -1;
    const auto& numbers = found->second;
    for (auto next = from(numbers, cursor_); next != numbers.begin(); --next) {
      const Planned& one = planned_[*std::prev(next)];
      if (one.position < cursor_ - kWindow) break;
      if (!one.is_taken) return *std::prev(next);
    }
    return -1;
  }

  // The nearest block that varies, fits and is free, of two as near the earlier one; or -1.
  int64_t of_those_that_vary(int64_t size) const {
    int64_t best = -1, least = kNear + 1;
    for (auto next = from(varying_, cursor_ - kNear); next != varying_.end(); ++next) {
      const Planned& one = planned_[*next];
      int64_t distance = std::abs(one.position - cursor_);
      if (one.position > cursor_ + kNear) break;
      if (one.is_taken || size > one.num_bytes || size < one.num_bytes / 2 || distance >= least) continue;
      if (current_->is_free(one.offset, one.offset + size)) best = *next, least = distance;
    }
    return best;
  }

  bool free_in_arena(void* block) {
    if (block < low_.load(std::memory_order_acquire) || block >= high_.load(std::memory_order_acquire)) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto one = arenas_.begin(); one != arenas_.end(); ++one) {
      if (!(*one)->holds(block)) continue;
      auto place = (*one)->living.find(static_cast<char*>(block) - (*one)->base);
      if (place == (*one)->living.end()) std::abort();  // freed twice
      c10::profiledCPUMemoryReporter().Delete(block);
      living_bytes_ -= place->second - place->first;
      (*one)->living.erase(place);
      if (one->get() != current_ && (*one)->living.empty()) {
        munmap((*one)->base, (*one)->size);
        arenas_.erase(one);
        cover();
      }
      return true;
    }
    return false;
  }

  bool free_mapping(void* block) {
    if (num_mappings_ == 0 || reinterpret_cast<uintptr_t>(block) % page_bytes() != 0) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = mappings_.find(block);
    if (found == mappings_.end()) return false;
    Mapping one = found->second;
    mappings_.erase(found);
    num_mappings_ = mappings_.size();
    if (one.step == step_) recorded_[one.number].death = time_++;
    c10::profiledCPUMemoryReporter().Delete(block);
    munmap(block, one.mapped_bytes);
    return true;
  }

  void retire() {  // the arena goes when the last block in it is freed
    planned_.clear();
    by_size_.clear();
    varying_.clear();
    if (current_ != nullptr && current_->living.empty()) {
      munmap(current_->base, current_->size);
      arenas_.erase(std::find_if(arenas_.begin(), arenas_.end(), [&](auto& one) { return one.get() == current_; }));
    }
    current_ = nullptr;
    cover();
  }

  int discard(size_t start, size_t end) {
    end = end / page_bytes() * page_bytes();
    return start < end && madvise(current_->base + start, end - start, MADV_DONTNEED) ? errno : 0;
  }

  void cover() {  // a first look at an address tells most blocks that lie in no arena
    char *low = nullptr, *high = nullptr;
    for (const auto& one : arenas_) {
      low = low == nullptr ? one->base : std::min(low, one->base);
      high = std::max(high, one->base + one->size);
    }
    low_ = low;
    high_ = high;
  }

  c10::Allocator* const usual_;
  const c10::DeleterFnPtr usual_free_;
  std::atomic<int64_t> mode_{kPassThrough}, least_bytes_{0};
  std::atomic<char*> low_{nullptr}, high_{nullptr};
  std::atomic<size_t> num_mappings_{0};
  std::mutex mutex_;  // for all that follows
  uint64_t step_ = 0;
  int64_t time_ = 0, living_bytes_ = 0;
  int64_t cursor_ = 0, passed_bytes_ = 0;  // where in the plan the step stands
  int64_t refused_bytes_ = 0;              // of blocks that do not vary and had no place since then
  Figures figures_{};
  std::vector<Recorded> recorded_;
  std::unordered_map<void*, Mapping> mappings_;
  std::vector<Planned> planned_;
  std::unordered_map<int64_t, std::vector<int64_t>> by_size_;  // numbers of planned blocks, in order
  std::vector<int64_t> varying_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  Arena* current_ = nullptr;
};

StepAllocator* allocator() {  // never destroyed: tensors may outlive everything else
  static auto* one = new StepAllocator(c10::GetDefaultCPUAllocator());
  return one;
}

void free_block(void* block) { allocator()->free(block); }

}  // namespace

extern "C" {

int arena_install() {
  if (c10::GetCPUAllocator() == allocator()) return 0;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return EBUSY;
  c10::SetCPUAllocator(allocator(), 1);
  return c10::GetCPUAllocator() == allocator() ? 0 : EPERM;
}

void arena_begin(int64_t mode, int64_t least_bytes) { allocator()->begin(mode, least_bytes); }
void arena_end() { allocator()->end(); }

int arena_plan(int64_t number, const int64_t* bytes, const int64_t* offsets, const int64_t* varies, int64_t size) {
  return allocator()->plan(number, bytes, offsets, varies, size);
}
void arena_drop() { allocator()->drop(); }
int arena_give_back() { return allocator()->give_back(); }

int64_t arena_num_recorded() { return allocator()->num_recorded(); }
int64_t arena_time() { return allocator()->time(); }
void arena_copy_recorded(int64_t* to) { allocator()->copy_recorded(to); }

void arena_figures(int64_t* to) {
  Figures found = allocator()->figures();
  const int64_t all[] = {found.num_served,    found.served_bytes,    found.num_missed, found.missed_bytes,
                         found.num_outliving, found.outliving_bytes, found.peak_bytes};
  std::copy(std::begin(all), std::end(all), to);
}
int64_t arena_living_bytes() { return allocator()->living_bytes(); }
}
