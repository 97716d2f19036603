// What llama.cpp uses of VK_EXT_layer_settings, for Vulkan headers before 1.3.272 (Debian 12 has 1.3.239), which lack it.
// llama.cpp only turns on a validation layer with it, and drivers skip structures that they do not know.
// scripts/make_wheelhouse.py includes this file before all others if the headers are older than that.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vk {

enum class LayerSettingTypeEXT : std::int32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    std::uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    std::int32_t sType = 1000496000;  // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void * pNext = nullptr;
    std::uint32_t settingCount;
    const LayerSettingEXT * pSettings;

    template <class Settings>
    explicit LayerSettingsCreateInfoEXT(const Settings & settings)
        : settingCount(static_cast<std::uint32_t>(settings.size())), pSettings(settings.data()) {}
};

}  // namespace vk
