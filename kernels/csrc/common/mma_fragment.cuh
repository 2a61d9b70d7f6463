// What a lane holds of the operands and results of mma.sync and wgmma.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include "common/partial.cuh"
#include "common/work_item.cuh"

namespace feather {

using namespace cute;

template <typename T>
struct MmaOp;
template <>
struct MmaOp<cutlass::half_t> {
  using type = SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct MmaOp<cutlass::bfloat16_t> {
  using type = SM80_16x8x16_F32BF16BF16F32_TN;
};

// Four 8x8 matrices of 16-bit values from shared memory, a row an address; transposed or not.
template <bool kTransposed>
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&a)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
  }
}

// Two neighbours in 16 bits.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  cutlass::NumericArrayConverter<T, float, 2> convert;
  cutlass::Array<T, 2> const pair = convert(cutlass::Array<float, 2>{low, high});
  return reinterpret_cast<uint32_t const&>(pair);
}

// Two bfloat16 in the operands' type.
template <typename T>
__device__ __forceinline__ uint32_t to_operand(uint32_t pair) {
  static_assert(std::is_same_v<T, cutlass::bfloat16_t>);
  return pack_pair<Operand<T>>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Pairs of even columns and of odd ones, as four neighbours (`column_of`).
template <typename T>
__device__ __forceinline__ void store_interleaved(T* to, uint32_t even, uint32_t odd) {
  *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

// And back: four neighbours of a query row as operands.
template <typename T>
__device__ __forceinline__ void load_interleaved(T const* from, uint32_t& even, uint32_t& odd) {
  uint2 pairs = *reinterpret_cast<uint2 const*>(from);
  if constexpr (!std::is_same_v<T, Operand<T>>) pairs = make_uint2(to_operand<T>(pairs.x), to_operand<T>(pairs.y));
  even = __byte_perm(pairs.x, pairs.y, 0x5410), odd = __byte_perm(pairs.x, pairs.y, 0x7632);
}

// The scores' probabilities in the operands' type.
template <typename T, class Scores>
__device__ __forceinline__ auto convert_type(Scores const& scores) {
  constexpr int kSize = decltype(size(scores))::value;
  auto p = make_fragment_like<T>(scores);
  cutlass::NumericArrayConverter<T, float, kSize> convert;
  *reinterpret_cast<cutlass::Array<T, kSize>*>(p.data()) =
      convert(*reinterpret_cast<cutlass::Array<float, kSize> const*>(scores.data()));
  return p;
}

// How a lane holds the results of 16 rows, in the accumulators of mma.sync and wgmma alike: rows lane / 4 + {0, 8}, of
// each the columns 8 j + 2 (lane % 4) + {0, 1}.
template <typename T, int kHeadDim>
struct WideLayout {
  static constexpr int kRows = 16, kChunks = kHeadDim / 4 / kPartChunk;  // of a part's row
  static constexpr int kNear = 1, kFar = 4;                              // lanes that share a row (`allreduce`)
  static __device__ int row(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
  static __device__ bool leads() { return threadIdx.x % 4 == 0; }
  static __device__ int chunk(int c) { return part_chunk(c / 2, 2 * (threadIdx.x % 4) + c % 2); }
  template <class Out>
  static __device__ float& value(Out& out, int i, int c, int e) { return out(4 * (8 * (c / 2) + e) + 2 * i + c % 2); }
  template <class Out>
  static __device__ void store(Params<T> const& params, Out const& out, Row const (&rows)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (rows[i].request < 0 || rows[i].part >= 0) continue;
      T* const row = params.out + rows[i].request * params.out_stride + rows[i].head * kHeadDim;
      if constexpr (kFp8) {
        T* const to = row + 4 * (threadIdx.x % 4);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; j += 2) {
          uint32_t const even = pack_pair<T>(out(4 * j + 2 * i), out(4 * j + 2 * i + 1));
          store_interleaved(to + 8 * j, even, pack_pair<T>(out(4 * j + 2 * i + 4), out(4 * j + 2 * i + 5)));
        }
      } else {
        T* const to = row + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
          *reinterpret_cast<uint32_t*>(to + 8 * j) = pack_pair<T>(out(4 * j + 2 * i), out(4 * j + 2 * i + 1));
        }
      }
    }
  }
};

// A warp's 16 query rows as the A operand of mma.sync and wgmma; rows[i] points at row lane/4 + 8 i (null: padding).
template <int kHeadDim, typename T, class Fragment>
__device__ __forceinline__ void load_queries(Fragment& q, T const* const (&rows)[2]) {
  auto words = recast<uint32_t>(q);
  if constexpr (kFp8) {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words(k * 4 + i) = words(k * 4 + i + 2) = 0u;
        if (rows[i]) load_interleaved(rows[i] + k * 16 + 4 * (threadIdx.x % 4), words(k * 4 + i), words(k * 4 + i + 2));
      }
    }
    return;
  }
  int const column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // (row + 8 (i % 2), k + 8 (i / 2))
      T const* const row = rows[i % 2];
      words(k * 4 + i) = row ? *reinterpret_cast<uint32_t const*>(row + k * 16 + 8 * (i / 2) + column) : 0u;
    }
  }
}

// Where the queries of a unit's row are; null for padding.
template <typename T, int kHeadDim>
__device__ T const* find_query(Params<T> const& params, StageInfo const& info, int const* members, int row) {
  int const member = params.group_div.div(row);
  if (member >= info.n_members) return nullptr;
  int const head = (info.edges >> kHeadShift) * params.group + row - member * params.group;
  return params.q + members[kMemberSize * member] * params.q_stride + head * kHeadDim;
}

// The same for a lane's two rows of a 16-row fragment (see load_queries), which are the unit's from first_row on.
template <typename T, int kHeadDim>
__device__ void find_queries(Params<T> const& params, StageInfo const& info, int const* members, int first_row,
                             T const* (&queries)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    queries[i] = find_query<T, kHeadDim>(params, info, members, first_row + WideLayout<T, kHeadDim>::row(i));
  }
}

// c (16 x 16, elements `c_first` on) += a (words `a_first` on) times b.
template <typename T, class C, class A>
__device__ __forceinline__ void mma_16x16x16(C& c, int c_first, A const& a, int a_first, uint32_t const (&b)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const at = c_first + 4 * half;
    MmaOp<T>::type::fma(c(at), c(at + 1), c(at + 2), c(at + 3), a(a_first), a(a_first + 1), a(a_first + 2),
                        a(a_first + 3), b[2 * half], b[2 * half + 1], c(at), c(at + 1), c(at + 2), c(at + 3));
  }
}

}  // namespace feather
